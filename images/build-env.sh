# shellcheck shell=sh
# Sourced by the Dockerfiles' build steps: takes what the builder handed over, if anything, as secrets.
if [ -e /run/build-env ]; then
    set -a
    # shellcheck source=/dev/null
    . /run/build-env
    set +a
fi
if [ -e /run/ca-bundle ]; then
    export PIP_CERT=/run/ca-bundle SSL_CERT_FILE=/run/ca-bundle
fi
