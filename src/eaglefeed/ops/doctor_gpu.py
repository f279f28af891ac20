"""The doctor's look at GPUs: driver, torch's build, NCCL, and whether each rank of a job has a device of its own."""

import csv
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, skipped, warn

__all__ = ["GpuPlan", "examine_gpus"]

_SMI_S, _TORCH_S = 10.0, 60.0
_SMI = ("--query-gpu=index,name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits")
_CUDA_FIX = "install a build of torch for CUDA (https://pytorch.org/get-started/locally), or set {0}=cpu"
_DRIVER_FIX = "see dmesg for NVRM and Xid lines; mend the driver, or reboot"
_BUSY = 0.5


@dataclass(frozen=True)
class GpuPlan:
    """What a run wants of GPUs.

    Args:
        devices: each setting that names a device, and its value, such as train.device → cuda:0.
        nccl: the settings that want NCCL.
        local_rank: of this process, among those of this machine.
        world_size: ranks of the job.
    """

    devices: Mapping[str, str]
    nccl: Sequence[str] = ()
    local_rank: int = 0
    world_size: int = 1

    @property
    def on_gpus(self) -> dict[str, str]:
        """The settings that name a GPU."""
        return {name: device for name, device in self.devices.items() if device.startswith("cuda")}


def examine_gpus(plan: GpuPlan) -> Iterator[Finding]:
    """Look at this machine's GPUs; torch is asked only where a setting names one, or NCCL."""
    yield from look("gpu.driver", partial(_driver, plan), 2 * _SMI_S)
    if plan.on_gpus:
        yield from look("gpu.torch", partial(_torch, plan), _TORCH_S)
    if plan.on_gpus or plan.nccl:
        yield from look("gpu.nccl", partial(_nccl, plan), _TORCH_S)


def _driver(plan: GpuPlan) -> Iterator[Said]:
    named = ", ".join(f"{name}={device}" for name, device in plan.on_gpus.items())
    program = shutil.which("nvidia-smi")
    if program is None:
        fix = "install NVIDIA's driver (in a container: run it with --gpus all), or set these to cpu"
        yield (
            fail(f"no nvidia-smi here, and {named}", fix) if named else skipped("no GPU here, and no setting names one")
        )
        return
    try:
        ran = subprocess.run([program, *_SMI], capture_output=True, text=True, timeout=_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        yield fail(f"nvidia-smi does not answer within {_SMI_S:g} s", _DRIVER_FIX)
        return
    if ran.returncode:
        yield fail(f"nvidia-smi fails: {(ran.stdout + ran.stderr).strip()[:200]}", _DRIVER_FIX)
        return
    for row in csv.reader(ran.stdout.splitlines(), skipinitialspace=True):
        yield _gpu(*row, is_wanted=bool(named))


def _gpu(index: str, name: str, driver: str, used_mib: str, total_mib: str, *, is_wanted: bool) -> Said:
    what = f"GPU {index}: {name}, driver {driver}, {used_mib} of {total_mib} MiB in use"
    if is_wanted and used_mib.isdecimal() and total_mib.isdecimal() and int(used_mib) > _BUSY * int(total_mib):
        return warn(
            f"{what}: something else runs on it", "see `nvidia-smi`, or choose another with CUDA_VISIBLE_DEVICES"
        )
    return ok(what)


def _torch(plan: GpuPlan) -> Iterator[Said]:
    import torch

    first = next(iter(plan.on_gpus))
    if torch.version.cuda is None:
        yield fail(f"torch {torch.__version__} is a build without CUDA, and {first} wants one", _CUDA_FIX.format(first))
        return
    if not torch.cuda.is_available():
        fix = "check the driver's version against torch's, CUDA_VISIBLE_DEVICES, and --gpus of the container"
        yield fail(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU", fix)
        return
    count = torch.cuda.device_count()
    yield ok(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees {count} GPUs")
    for name, device in plan.on_gpus.items():
        index = device.partition(":")[2]
        if index.isdecimal() and int(index) >= count:
            yield fail(f"{name}={device}, and there are {count} GPUs", f"set it to cuda:0 to cuda:{count - 1}")
    yield from _ranks(plan, count)


def _ranks(plan: GpuPlan, count: int) -> Iterator[Said]:
    if plan.world_size > 1 and "train.device" in plan.on_gpus and plan.local_rank >= count:
        what = f"local rank {plan.local_rank} of {plan.world_size} ranks has no GPU of its own: there are {count}"
        yield fail(what, f"start at most {count} ranks a machine (torchrun --nproc-per-node {count})")


def _nccl(plan: GpuPlan) -> Iterator[Said]:
    import torch

    wants = [*plan.nccl, *(["a job of several ranks on GPUs"] if plan.world_size > 1 and plan.on_gpus else [])]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield ok("torch has NCCL" if torch.cuda.is_available() else "torch has NCCL, and no GPU to run it on")
    elif wants:
        fix = "install a build of torch for CUDA, or use gloo or http as the data plane"
        yield fail(f"this torch has no NCCL, and {', '.join(wants)} wants it", fix)
    else:
        yield skipped("this torch has no NCCL, and nothing wants it")
