"""Tests of the environment variables and CPU limits of a worker process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar._process.driver_env import select_forwarded
from drawbar._process.rank_assignment import assign_local_gpus, format_visible_devices
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.worker_env import (
    THREAD_ENV_VARS,
    compute_thread_count,
    count_available_cores,
    get_visible_gpu_ids,
    make_thread_env_vars,
    make_torchrun_env_vars,
)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_URI",
        "AWS_REGION",
        "NCCL_DEBUG",
        "TORCH_LOGS",
        "CUDA_LAUNCH_BLOCKING",
        "TF_CPP_MIN_LOG_LEVEL",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
    ],
)
def test_select_forwarded_includes_known_variables(name: str) -> None:
    assert select_forwarded({name: "1"}) == {name: "1"}


@pytest.mark.parametrize("name", ["PATH", "HOME", "MY_TOKEN", "LD_PRELOAD", "AWS", "XHF_TOKEN"])
def test_select_forwarded_includes_other_variables_on_request(name: str) -> None:
    assert select_forwarded({name: "1"}) == {}
    assert select_forwarded({name: "1"}, [name]) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "RAY_ADDRESS",
        "RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TF_CONFIG",
        "PYTHONPATH",
        "NEURON_RT_VISIBLE_CORES",
    ],
)
def test_select_forwarded_rejects_reserved_variables(name: str) -> None:
    assert select_forwarded({name: "1"}, ["*"]) == {}
    with pytest.raises(ValueError, match=f"forward_env names '{name}', which is never forwarded"):
        select_forwarded({}, [name])


def test_select_forwarded_applies_user_patterns() -> None:
    environ = {"MY_A": "1", "MY_B": "2", "my_c": "3", "OTHER": "4"}
    assert select_forwarded(environ, ["MY_*", "NOT_SET"]) == {"MY_A": "1", "MY_B": "2"}


def test_select_forwarded_in_ray_job_ignores_omp_num_threads() -> None:
    job = {"RAY_RAYLET_PID": "7", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "3"}
    assert select_forwarded(job) == {"MKL_NUM_THREADS": "3"}
    assert select_forwarded(job, ["OMP_NUM_THREADS"])["OMP_NUM_THREADS"] == "1"


def test_torchrun_env_vars_match_torchrun(tmp_path: Path) -> None:
    """Compare with torchrun itself, except for the variables of its rendezvous and agent."""
    script = tmp_path / "script.py"
    script.write_text("import os, json; print(json.dumps(dict(os.environ)))")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, *launch], env=env, check=True, capture_output=True, text=True
    )
    expected = json.loads(completed.stdout.splitlines()[-1])
    env_vars = make_torchrun_env_vars(
        Ranks(
            world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1
        )
    )
    assert env_vars.items() <= (expected | {"NODE_RANK": "0"}).items()
    names = {name for name in expected if name.endswith(("RANK", "WORLD_SIZE")) or "ROLE" in name}
    assert names <= env_vars.keys()


def test_torchrun_env_vars_contain_all_ranks() -> None:
    ranks = Ranks(
        world_rank=3, world_size=5, local_rank=1, local_world_size=2, node_rank=1, num_nodes=3
    )
    assert make_torchrun_env_vars(ranks) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "5",
        "ROLE_NAME": "default",
    }


@pytest.mark.parametrize(
    ("cpus_per_worker", "local_world_size", "cores", "expected"),
    [
        (None, 1, 8, 8),  # a single worker uses all cores
        (None, 3, 8, 2),
        (None, 4, 2, 1),
        (4, 1, 16, 4),
        (4, 1, 2, 2),
        (2.9, 1, 16, 2),
        (0.5, 1, 16, 1),
        (0, 1, 16, 1),
    ],
)
def test_compute_thread_count_uses_cpus_or_cores(
    cpus_per_worker: float | None, local_world_size: int, cores: int, expected: int
) -> None:
    count = compute_thread_count(
        cpus_per_worker=cpus_per_worker, local_world_size=local_world_size, cores=cores
    )
    assert count == expected


def test_thread_env_vars_replace_omp_num_threads_of_ray() -> None:
    assert make_thread_env_vars(4, {"OMP_NUM_THREADS": "1"}, {}) == dict.fromkeys(
        THREAD_ENV_VARS, "4"
    )


def test_thread_env_vars_keep_values_of_the_user() -> None:
    variables = make_thread_env_vars(
        4, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "6"}, {"MKL_NUM_THREADS": "3"}
    )
    assert variables.keys() == {
        "OMP_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    }


def test_thread_env_vars_use_omp_num_threads_for_all_libraries() -> None:
    variables = make_thread_env_vars(4, {}, {"OMP_NUM_THREADS": "2,1"})
    assert variables == dict.fromkeys(THREAD_ENV_VARS[1:], "2")


@pytest.mark.parametrize(
    ("gpu_ids", "expected"),
    [
        ([], ""),
        ([()], ""),
        ([("10", "2"), ("0",)], "0,2,10"),
        ([("0",), ("0",)], "0"),
        ([("GPU-b",), ("GPU-a",)], "GPU-a,GPU-b"),
    ],
)
def test_format_visible_devices_joins_sorted_unique_ids(
    gpu_ids: list[tuple[str, ...]], expected: str
) -> None:
    workers = [
        WorkerInfo(node_id="a", node_ip="10.0.0.1", hostname="host", pid=1, gpu_ids=ids)
        for ids in gpu_ids
    ]
    assert format_visible_devices(workers) == expected


def test_available_cores_with_affinity_are_limited() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from drawbar._process.worker_env import count_available_cores; "
        "print(count_available_cores())"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "1\n"


@pytest.mark.parametrize("quota", ["150000 100000", "50000 100000"])
@pytest.mark.parametrize("group", ["", "outer", "outer/inner"])
def test_available_cores_with_cgroup_quota_are_limited(
    tmp_path: Path, group: str, quota: str
) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "cpu.max").write_text("max 100000\n")
    (tmp_path / group / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "membership").write_text("1:cpu:/elsewhere\n0::/outer/inner\n")
    cores = count_available_cores(cgroup_root=tmp_path, membership=tmp_path / "membership")
    assert cores == 1


def test_available_cores_without_cgroups_are_positive(tmp_path: Path) -> None:
    assert count_available_cores(cgroup_root=tmp_path, membership=tmp_path / "none") >= 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", ("1",)),
        ("GPU-b, MIG-a,", ("GPU-b", "MIG-a")),
    ],
)
def test_get_visible_gpu_ids_reads_cuda_visible_devices(
    value: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert get_visible_gpu_ids() == expected


@pytest.mark.parametrize(
    ("gpus_per_worker", "expected"),
    [
        (0, [(), ()]),
        (1, [("7",), ("8",)]),
        (2, [("7", "8"), ("9",)]),
        (0.5, [("7",), ("7",), ("8",)]),
    ],
)
def test_assign_local_gpus_gives_each_rank_its_part(
    gpus_per_worker: float, expected: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8,9")
    assert assign_local_gpus(gpus_per_worker, len(expected)) == expected
