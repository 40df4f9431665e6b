"""The oracle: plain torch that reads like the specification."""
