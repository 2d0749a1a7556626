# Sourced by the Dockerfiles' build steps: takes the settings that the builder handed over, if any.
if [ -e /run/build-env ]; then
    set -a
    # shellcheck source=/dev/null
    . /run/build-env
    set +a
fi
