#!/usr/bin/env bash
# Run a command on a lent GPU machine, where nothing can be installed from a registry: the wheels
# carried in .whl/ go into a folder of their own, and the checkout becomes an importable tree.
# In the repository's root: tests/campaign/lent_machine.sh COMMAND...
set -euo pipefail

repo=$PWD
site=${TMPDIR:-/tmp}/twinstream-site
tree=${TMPDIR:-/tmp}/twinstream-tree

if compgen -G ".whl/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .whl/*.whl
fi

# Folders at the top of the repository are packages inside twinstream.
mkdir -p "$tree/twinstream"
ln -sfn "$repo"/twinstream/* "$tree/twinstream/"
for folder in executor hardware_profiles models planner simulator; do
    ln -sfn "$repo/$folder" "$tree/twinstream/$folder"
done
for name in tests docs pyproject.toml; do
    ln -sfn "$repo/$name" "$tree/$name"
done

export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$tree"
exec "$@"
