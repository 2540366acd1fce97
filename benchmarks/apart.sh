#!/usr/bin/env bash
# Run a command with GPUs, cores, ports, processes and a /tmp of its own, so that several tables can
# be made side by side on one host. Needs Linux and root; --work and --out must lie outside of /tmp.
#
#   benchmarks/apart.sh GPUS CORES COMMAND ...
#   benchmarks/apart.sh 0,1 0-31 python -m benchmarks.table --only two-gpus --work /srv/w --out /srv/a.jsonl
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,6s/^# \?//p' "$0"
  exit 2
fi
export CUDA_VISIBLE_DEVICES=$1 CUDA_DEVICE_ORDER=PCI_BUS_ID
# The only network there is inside.
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1
cores=$2
shift 2
own=$(mktemp -d /var/tmp/apart.XXXXXX)
trap 'rm -rf "$own"' EXIT
# lo is down in a new network; not every image has iproute2.
up='import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))'
unshare --net --mount --pid --fork --mount-proc --kill-child taskset --cpu-list "$cores" \
  bash -c 'mount --bind "$0" /tmp && python3 -c "$1" && shift && "$@"' "$own" "$up" "$@"
