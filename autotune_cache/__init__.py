"""How calls are launched: keys, tuned entries on disk, look-up, and the tuner that makes them."""
