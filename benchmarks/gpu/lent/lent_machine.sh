#!/usr/bin/env bash
# Run a command on a lent GPU machine, where nothing can be installed from a registry: carried
# wheels go into a folder of their own, and the checkout becomes an importable tree, copied, so
# that a campaign that runs on is not disturbed when the next call sends the checkout again.
# In the repository's root: benchmarks/gpu/lent/lent_machine.sh COMMAND...
set -euo pipefail

TWINSTREAM_CALL_STARTED=$(date +%s.%N)
base=${TWINSTREAM_LENT:-/tmp}
site=$base/twinstream-site
stash=$base/twinstream-flash4
repo=$PWD

install() { # FOLDER: its wheels, once, into the site
    local done
    done=$base/twinstream-installed-$(ls "$1" | cksum | cut -d" " -f1)
    if [ ! -e "$done" ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$site" "$1"/*.whl
        touch "$done"
    fi
}

for folder in .whl .carry/cudnn; do
    if compgen -G "$folder/*.whl" >/dev/null; then
        install "$folder"
    fi
done

# flash-attn 4 has a wheel of 88 MiB, and a call carries 64: the parts of its calls are kept here,
# since a carried folder replaces itself. What is not whole is not installed.
mkdir -p "$stash"
for part in .carry/flash4-1 .carry/flash4-2; do
    if compgen -G "$part/*" >/dev/null; then
        cp -n "$part"/* "$stash/"
    fi
done
if [ -e "$stash/SHA256SUMS" ]; then
    for first in "$stash"/*.whl.part-aa; do
        wheel=${first%.part-aa}
        if [ -e "$first" ] && [ ! -e "$wheel" ]; then
            cat "$wheel".part-* >"$wheel.partial"
            mv "$wheel.partial" "$wheel"
        fi
    done
    if (cd "$stash" && sha256sum --check --status SHA256SUMS 2>/dev/null); then
        install "$stash"
    else
        rm -f "$stash"/nvidia_cutlass_dsl_libs_cu13-*.whl
        echo "flash-attn 4 is not whole yet: its second part comes with the next call" >&2
    fi
fi

# Folders at the top of the repository are packages inside twinstream.
packages=(executor hardware_profiles models planner simulator)
others=(benchmarks tests docs pyproject.toml)
sum=$(find twinstream "${packages[@]}" "${others[@]}" -type f ! -name "*.pyc" \
    -exec cksum {} + | sort -k 3 | cksum | cut -d" " -f1)
tree=$base/twinstream-tree-$sum
if [ ! -e "$tree/whole" ]; then
    mkdir -p "$tree"
    cp -r twinstream "${others[@]}" "$tree/"
    for folder in "${packages[@]}"; do
        cp -r "$folder" "$tree/twinstream/$folder"
        ln -sfn "twinstream/$folder" "$tree/$folder"
    done
    touch "$tree/whole"
fi

# `cutlass` is where a .pth file of nvidia-cutlass-dsl says, which --target does not read.
export PYTHONPATH="$site:$site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$base/twinstream-flash4-cache
export PYTHONUNBUFFERED=1 TWINSTREAM_CALL_STARTED TWINSTREAM_CHECKOUT=$repo
cd "$tree"
exec "$@"
