# Sourced by the scripts in ci/: goes to the repository's root, and makes and fills .venv there.
# Runs from any directory, under any user, whether or not another environment is active.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
venv=.venv
python=$venv/bin/python

# The first Python that is new enough and can make an environment; PYTHON=... overrides.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python >= 3.10 with venv and ensurepip found (tried: ${PYTHON:-python3 python3.13 ... python});" \
        "install one (Debian: apt-get install python3-venv) or set PYTHON" >&2
    return 1
}

pip_install() {
    "$python" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

# prepare EXTRAS: .venv holds the project (editable) and its extras. Quick when nothing that decides it has changed.
prepare() {
    local extras=$1 stamp wanted
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$venv"
        "$(find_python)" -m venv "$venv"
    fi
    stamp=$venv/.installed-${extras//,/-}
    wanted=$(cat pyproject.toml constraints.txt ci/setup.sh | cksum)
    if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
        return
    fi
    echo "installing mxkv[$extras] into $venv (once; it takes minutes)"
    # First and alone, pinned: an index may offer a newer torch, and wheels on this disk serve the pinned one.
    pip_install torch==2.13.0
    pip_install --constraint constraints.txt --editable ".[$extras]"
    echo "$wanted" >"$stamp"
}
