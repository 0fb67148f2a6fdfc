"""Select the driver's environment variables that workers receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

DEFAULT_FORWARDED_PATTERNS = (
    # Models, data sets and tokenizers
    *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*"),
    # Experiment trackers
    *("WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "CLEARML_*", "DATABRICKS_*", "TENSORBOARD_*"),
    # Storage and its credentials
    *("AWS_*", "GOOGLE_*", "GCS_*", "AZURE_*", "S3_*", "FSSPEC_*"),
    # Communication
    *("NCCL_*", "GLOO_*", "UCC_*", "UCX_*", "FI_*"),
    # Frameworks
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "CUBLAS_*"),
    *("CUDNN_*", "XLA_*", "JAX_*", "TF_*", "KERAS_*", "XGBOOST_*", "LIGHTGBM_*"),
    *("ACCELERATE_*", "FSDP_*", "DS_*", "DEEPSPEED_*", "LIGHTNING_*", "PL_*"),
    # Threads and seeds. PYTHONHASHSEED reaches only the worker's child processes.
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*", "PYTHONHASHSEED"),
)
"""Patterns of variables that workers receive; `RunConfig.forward_env` adds more."""

_DEVICE_REASON = "Ray assigns devices to each worker"
_RANK_REASON = "Drawbar sets it for each worker by its rank"
_STARTUP_REASON = (
    "Python reads it only when a process starts; send code with worker_runtime_env instead"
)

EXCLUDED_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "*_VISIBLE_DEVICES": _DEVICE_REASON,  # CUDA, NVIDIA, HIP, ROCR, ASCEND_RT, QBRUNTIME, TT
        "*_VISIBLE_CORES": _DEVICE_REASON,  # NEURON_RT
        "*_VISIBLE_CHIPS": _DEVICE_REASON,  # TPU
        "*_VISIBLE_MODULES": _DEVICE_REASON,  # HABANA
        "GPU_DEVICE_ORDINAL": _DEVICE_REASON,
        "ONEAPI_DEVICE_SELECTOR": _DEVICE_REASON,
        "ZE_AFFINITY_MASK": _DEVICE_REASON,
        "FURIOSA_DEVICES": _DEVICE_REASON,
        "RBLN_DEVICES": _DEVICE_REASON,
        "DRAWBAR_*": "it describes a process of another run",
        "RAY_*": "it describes the driver's connection to Ray",
        "RANK": _RANK_REASON,
        "LOCAL_RANK": _RANK_REASON,
        "NODE_RANK": _RANK_REASON,
        "GROUP_RANK": _RANK_REASON,
        "ROLE_RANK": _RANK_REASON,
        "ROLE_NAME": _RANK_REASON,
        "WORLD_SIZE": _RANK_REASON,
        "LOCAL_WORLD_SIZE": _RANK_REASON,
        "GROUP_WORLD_SIZE": _RANK_REASON,
        "ROLE_WORLD_SIZE": _RANK_REASON,
        "MASTER_ADDR": _RANK_REASON,
        "MASTER_PORT": _RANK_REASON,
        "TORCHELASTIC_*": _RANK_REASON,
        "PET_*": _RANK_REASON,  # options of torchrun, if the driver runs under it
        "TF_CONFIG": _RANK_REASON,
        "PYTHONPATH": _STARTUP_REASON,
        "PYTHONHOME": _STARTUP_REASON,
    }
)
"""Patterns of variables that workers never receive from the driver, each with the reason."""


def select_forwarded(
    environ: Mapping[str, str], extra_patterns: Sequence[str] = ()
) -> dict[str, str]:
    """Select the driver's environment variables that workers receive.

    If Ray started the driver (a Ray job, a task, or a Tune trial), OMP_NUM_THREADS was set by Ray
    and not by the user. It is then only forwarded if `extra_patterns` contains its exact name.

    Args:
        environ: Environment of the driver.
        extra_patterns: Names or patterns such as "MY_*" in addition to
            `DEFAULT_FORWARDED_PATTERNS`. Names that are not set in `environ` are ignored.

    Returns:
        Variables to forward.

    Raises:
        ValueError: `extra_patterns` names a variable of `EXCLUDED_PATTERNS`. A wider pattern that
            also matches one is allowed; that variable is omitted.
    """
    for name in extra_patterns:
        if (reason := get_exclusion_reason(name)) is not None:
            raise ValueError(
                f"RunConfig.forward_env names {name!r}, which is never forwarded: {reason}"
            )
    chosen = {
        name: value
        for name, value in environ.items()
        if _matches(name, (*DEFAULT_FORWARDED_PATTERNS, *extra_patterns))
        and get_exclusion_reason(name) is None
    }
    # Ray sets it in this process to the number of its CPUs (ray-project/ray#30496).
    if "RAY_RAYLET_PID" in environ and "OMP_NUM_THREADS" not in extra_patterns:
        chosen.pop("OMP_NUM_THREADS", None)
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def get_exclusion_reason(name: str) -> str | None:
    """Return why a variable is never forwarded, or None if it can be."""
    return next((why for p, why in EXCLUDED_PATTERNS.items() if fnmatchcase(name, p)), None)
