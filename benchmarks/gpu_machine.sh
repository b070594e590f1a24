#!/usr/bin/env bash
# One call on a machine with a GPU and many cores, which needs no network and no rights:
#
#     benchmarks/gpu_machine.sh OUT
#
# It takes LIMIT seconds at most (480 by default). Each part has a share of them and writes a file
# of its own into OUT; `summary.txt` says which parts ended and how. GIB (8 by default) is the size
# of each state. Without a GPU the parts that need one say so, and the others run.
#
# What the machine's Python lacks comes as wheels in `.whl/`, for its version and platform:
#
#     pip download --only-binary :all: --no-deps -d .whl --python-version 3.12 \
#         --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
#         boto3 botocore execnet hypothesis iniconfig jmespath lazy-loader msgspec obstore \
#         packaging pluggy psutil pygments pytest pytest-timeout pytest-xdist python-dateutil \
#         s3torchconnectorclient s3transfer six sortedcontainers tenacity tqdm typing-extensions \
#         urllib3 xxhash
#     pip wheel --no-deps -w .whl s3torchconnector    # pure Python, without a wheel of its own
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?the folder for what it finds}
limit=${LIMIT:-480}
gib=${GIB:-8}
mkdir -p "$out"
out=$(cd "$out" && pwd)
begun=$SECONDS

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv --without-pip "$scratch/venv"
# The machine's own packages (torch among them) come after what is carried.
inside=$(echo "$scratch"/venv/lib/python3*/site-packages)
python3 -c '
import sysconfig
print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' >"$inside/machine.pth"
if compgen -G ".whl/*.whl" >/dev/null; then
  for wheel in .whl/*.whl; do
    # A wheel is a zip file of what belongs into site-packages.
    python3 -m zipfile -e "$wheel" "$inside"
  done
fi
export PATH="$scratch/venv/bin:$PATH" VIRTUAL_ENV="$scratch/venv" PYTHONPATH=$PWD PYTHONUNBUFFERED=1

# part NAME SECONDS COMMAND...: at most these seconds, of a LIMIT of 480.
part() {
  local name=$1 share=$(($2 * limit / 480)) started=$SECONDS status
  shift 2
  {
    echo "\$ $*"
    timeout --kill-after=5 "$share" "$@" 2>&1
    status=$?
    echo
  } >>"$out/${name%%-*}.txt"
  echo "$name: status $status, $((SECONDS - started)) s of $share" | tee -a "$out/summary.txt"
}

{
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "no GPU"
  grep -m 1 "model name" /proc/cpuinfo
  echo "$(nproc) cores, $(free -g | awk '/Mem/ {print $2}') GiB of memory"
  python -c '
import platform, torch, obstore, s3torchconnector
from importlib.metadata import version
print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda,
      "obstore", version("obstore"), "s3torchconnector", version("s3torchconnector"))'
} >"$out/summary.txt" 2>&1

# The tests of a GPU: the ring of pinned buffers, FSDP2, NCCL with one rank, optimizers.
part tests 80 python -m pytest -p no:cacheprovider -q -n 0 -m gpu -rs \
  tests/state tests/e2e/test_gpu_training.py
# Pinned copies, save, load and the stall of `async_save`, each against the floor.
part gpu 80 python -m benchmarks gpu --gib "$gib" --tensors 64 --rounds 3
part gpu-memory 40 python -m benchmarks gpu --gib "$gib" --tensors 64 --rounds 2 --target memory
# The processor's side, with as many cores as there are. Each round is a process for each library.
size=(--gib "$(python -c "print($gib / 4)")" --tensors 64 --rounds 2)
for wire in "" --tls; do
  part "cores-save$wire" 32 python -m benchmarks save $wire "${size[@]}" \
    --peers raw dcp_objstore s3torchconnector
  part "cores-load$wire" 52 python -m benchmarks load $wire "${size[@]}" \
    --peers raw dcp_objstore s3torchconnector
done
for ranks in 1 4 8; do
  [ "$(nproc)" -ge "$ranks" ] || continue
  for wire in "" --tls; do
    part "ranks-$ranks$wire" 18 python -m benchmarks resume $wire "${size[@]}" \
      --saved-by "$ranks" --loaded-by "$ranks" --peers dcp_objstore s3torchconnector
  done
done
echo "all: $((SECONDS - begun)) s" | tee -a "$out/summary.txt"
