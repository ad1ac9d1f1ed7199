#!/usr/bin/env bash
# A newcomer's path, timed: from a clone to the first cause on a sample, and from `pip install` to the first cause on a
# model of their own (the tutorial's), with the commands as they are typed. In: this repository. Out: seconds.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH

cd "$place"
SECONDS=0
git clone -q "$root" nandoctor && cd nandoctor
python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e .
echo "clone and install: $SECONDS s"
.venv/bin/nandoctor replay sample_dumps/unet_blank_tile.pth >/dev/null
echo "clone to the first cause on a sample: $SECONDS s"

mkdir "$place/own" && cd "$place/own"
cp ../nandoctor/docs/tutorial/train.py .
SECONDS=0
python3 -m venv .venv && .venv/bin/pip install -q -c ../nandoctor/constraints.txt ../nandoctor
echo "install: $SECONDS s"
.venv/bin/python train.py || true
.venv/bin/nandoctor replay nan.pth --model train.py:Net -o report.html | head -3
echo "install to the first cause on a model of one's own, training and page included: $SECONDS s"
