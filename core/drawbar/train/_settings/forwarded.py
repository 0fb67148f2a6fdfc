"""Which of the driver's environment variables the workers get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

DEFAULT_FORWARDED = (
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

_DEVICES = "Ray gives each worker its own devices"
_RANKS = "it is set for each worker from its own place in the group"
_STARTUP = "Python reads it only as a process starts; send code with worker_runtime_env instead"

NEVER_FORWARDED: Mapping[str, str] = MappingProxyType(
    {
        "*_VISIBLE_DEVICES": _DEVICES,  # CUDA, NVIDIA, HIP, ROCR, ASCEND_RT, QBRUNTIME, TT
        "*_VISIBLE_CORES": _DEVICES,  # NEURON_RT
        "*_VISIBLE_CHIPS": _DEVICES,  # TPU
        "*_VISIBLE_MODULES": _DEVICES,  # HABANA
        "GPU_DEVICE_ORDINAL": _DEVICES,
        "ONEAPI_DEVICE_SELECTOR": _DEVICES,
        "ZE_AFFINITY_MASK": _DEVICES,
        "FURIOSA_DEVICES": _DEVICES,
        "RBLN_DEVICES": _DEVICES,
        "DRAWBAR_*": "it describes a process of an other run",
        "RAY_*": "it describes the driver's own connection to Ray",
        "RANK": _RANKS,
        "LOCAL_RANK": _RANKS,
        "NODE_RANK": _RANKS,
        "GROUP_RANK": _RANKS,
        "ROLE_RANK": _RANKS,
        "ROLE_NAME": _RANKS,
        "WORLD_SIZE": _RANKS,
        "LOCAL_WORLD_SIZE": _RANKS,
        "GROUP_WORLD_SIZE": _RANKS,
        "ROLE_WORLD_SIZE": _RANKS,
        "MASTER_ADDR": _RANKS,
        "MASTER_PORT": _RANKS,
        "TORCHELASTIC_*": _RANKS,
        "PET_*": _RANKS,  # the options of a torchrun that the driver itself runs under
        "TF_CONFIG": _RANKS,
        "PYTHONPATH": _STARTUP,
        "PYTHONHOME": _STARTUP,
    }
)
"""Glob patterns that no worker ever gets from the driver, each with the reason."""


def forwarded(environ: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """Choose the driver's environment variables that the workers get.

    In a driver that Ray started itself (a Ray job, a task, a Tune trial), OMP_NUM_THREADS is Ray's
    and not the user's; it is then forwarded only if `extra` names it exactly.

    Args:
        environ: The driver's environment.
        extra: The user's own names, or patterns such as "MY_*", besides `DEFAULT_FORWARDED`. A name
            that is not set in `environ` is left out.

    Raises:
        ValueError: `extra` names a variable of `NEVER_FORWARDED`. A wider pattern that covers one
            is fine: the variable is left out.
    """
    for name in extra:
        if (reason := why_never(name)) is not None:
            raise ValueError(
                f"RunConfig.forward_env names {name!r}, which is never forwarded: {reason}"
            )
    chosen = {
        name: value
        for name, value in environ.items()
        if _matches(name, (*DEFAULT_FORWARDED, *extra)) and why_never(name) is None
    }
    # Ray has set it for this process, by the CPUs that it counts for that (ray-project/ray#30496).
    if "RAY_RAYLET_PID" in environ and "OMP_NUM_THREADS" not in extra:
        chosen.pop("OMP_NUM_THREADS", None)
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def why_never(name: str) -> str | None:
    return next((why for p, why in NEVER_FORWARDED.items() if fnmatchcase(name, p)), None)
