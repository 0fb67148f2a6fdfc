"""Which of the driver's environment variables the workers get."""

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
"""Glob patterns of the driver's variables that workers get; `RunConfig.forward_env` adds more."""

_DEVICE_REASON = "Ray gives each worker its own devices"
_RANK_REASON = "it is set for each worker from its own place in the group"
_STARTUP_REASON = (
    "Python reads it only as a process starts; send code with worker_runtime_env instead"
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
        "DRAWBAR_*": "it describes a process of an other run",
        "RAY_*": "it describes the driver's own connection to Ray",
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
        "PET_*": _RANK_REASON,  # the options of a torchrun that the driver itself runs under
        "TF_CONFIG": _RANK_REASON,
        "PYTHONPATH": _STARTUP_REASON,
        "PYTHONHOME": _STARTUP_REASON,
    }
)
"""Glob patterns that no worker ever gets from the driver, each with the reason."""


def select_forwarded(
    environ: Mapping[str, str], extra_patterns: Sequence[str] = ()
) -> dict[str, str]:
    """Choose the driver's environment variables that the workers get.

    In a driver that Ray started itself (a Ray job, a task, a Tune trial), OMP_NUM_THREADS is Ray's
    and not the user's; it is then forwarded only if `extra` names it exactly.

    Args:
        environ: The driver's environment.
        extra: The user's own names, or patterns such as "MY_*", besides
            `DEFAULT_FORWARDED_PATTERNS`. A name
            that is not set in `environ` is left out.

    Raises:
        ValueError: `extra` names a variable of `EXCLUDED_PATTERNS`. A wider pattern that covers one
            is fine: the variable is left out.
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
    # Ray has set it for this process, by the CPUs that it counts for that (ray-project/ray#30496).
    if "RAY_RAYLET_PID" in environ and "OMP_NUM_THREADS" not in extra_patterns:
        chosen.pop("OMP_NUM_THREADS", None)
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def get_exclusion_reason(name: str) -> str | None:
    return next((why for p, why in EXCLUDED_PATTERNS.items() if fnmatchcase(name, p)), None)
