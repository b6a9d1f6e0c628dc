#!/usr/bin/env bash
# Reproduce docs/benchmarks/accuracy.md from a table of measured runs: bash recorded_runs.sh TABLE.csv
set -euo pipefail
T=$1
CELLS=docs/benchmarks/cells
FIDELITY="python -m benchmarks.accuracy.fidelity"
H100="--cells $CELLS-h100-2026-11-21.csv"
RTX3090="--cells $CELLS-rtx3090-2026-11-21.csv"

twinstream calibrate --base h100_datasheet --measured "$T" -o h100_fitted.toml
twinstream calibrate --base rtx3090_datasheet --measured "$T" -o rtx3090_fitted.toml
twinstream validate --machine h100 --machine rtx3090 --measured "$T" --json
twinstream validate --machine h100_fitted.toml --measured "$T" -o h100.csv --html h100.html
twinstream validate --machine rtx3090_fitted.toml --measured "$T" -o rtx3090.csv
$FIDELITY summary h100.csv --measured "$T" $H100
$FIDELITY summary rtx3090.csv --measured "$T" $RTX3090
$FIDELITY plot h100.csv rtx3090.csv --measured "$T" $H100 $RTX3090 -o fidelity.svg
$FIDELITY phases --machine h100_fitted.toml --measured "$T"

# 8B alone predicts 1B; the last argument is a list of the cells that this fit took
twinstream calibrate --base h100_datasheet --measured "$T" --only model=8B -o h100_8b.toml
twinstream validate --machine h100_8b.toml --measured "$T" -o h100_8b.csv
$FIDELITY summary h100_8b.csv --measured "$T" --cells "${2:-cells_of_that_fit.csv}"

# borrowing: then validate and summary of each profile, as above
$FIDELITY borrow --machine rtx3090_datasheet --relative h100_fitted.toml -o rtx3090_borrowed.toml
$FIDELITY borrow --machine h100_datasheet --relative rtx3090_fitted.toml -o h100_borrowed.toml
$FIDELITY borrow --machine rtx3090_fitted.toml --relative h100_fitted.toml \
    --keep sustained --keep attention_forward -o rtx3090_keeps_two.toml
python -m benchmarks.accuracy.borrowed_profiles
