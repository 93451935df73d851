"""How many floating-point operations a second devices make at most."""

from __future__ import annotations

import torch

# Dense matrix products by dtype, in 1e12 operations a second, from the makers' data sheets ("NVIDIA H100 Tensor Core
# GPU", "H200", "A100", "V100", "T4", "L4", "L40S", "A10", and the Ada and Ampere GA102 architecture white papers, with
# float32 accumulation). They print some with sparsity, which is twice as many. By what the names that CUDA reports
# start with.
_HALF = {
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "Tesla V100-SXM2": 125.0,
    "Tesla V100-PCIE": 112.0,
    "Tesla T4": 65.0,
}
_TF32 = {
    "NVIDIA H200 NVL": 417.5,
    "NVIDIA H200": 494.7,
    "NVIDIA H100 80GB HBM3": 494.7,
    "NVIDIA H100 NVL": 417.5,
    "NVIDIA H100 PCIe": 378.0,
    "NVIDIA A100": 156.0,
    "NVIDIA L40S": 183.0,
    "NVIDIA L4": 60.0,
    "NVIDIA A10": 62.5,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
}
_FLOAT32 = {
    "NVIDIA H200 NVL": 60.0,
    "NVIDIA H200": 66.9,
    "NVIDIA H100 80GB HBM3": 66.9,
    "NVIDIA H100 NVL": 60.0,
    "NVIDIA H100 PCIe": 51.2,
    "NVIDIA A100": 19.5,
    "NVIDIA L40S": 91.6,
    "NVIDIA L4": 30.3,
    "NVIDIA A10": 31.2,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
    "Tesla V100-SXM2": 15.7,
    "Tesla V100-PCIE": 14.0,
    "Tesla T4": 8.1,
}
# Names that start like others, of devices with other peaks.
_OTHERS = ("NVIDIA L40", "NVIDIA A10G", "NVIDIA A100X", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti")
_NO_BFLOAT16 = ("Tesla V100", "Tesla T4")


def peak_flops(name: str, dtype: torch.dtype, allow_tf32: bool) -> float | None:
    """How many operations a second a device makes at most, in dense matrix products; None if it is not known.

    Args:
        name: what CUDA calls the device.
        allow_tf32: whether products of float32 may be made in TF32.
    """
    if dtype in (torch.bfloat16, torch.float16):
        table = {} if dtype == torch.bfloat16 and name.startswith(_NO_BFLOAT16) else _HALF
    elif dtype == torch.float32:
        table = _FLOAT32 | (_TF32 if allow_tf32 else {})
    else:
        table = {}
    if name.startswith(_OTHERS) and not name.startswith("NVIDIA L40S"):
        return None
    return next((1e12 * peak for start, peak in table.items() if name.startswith(start)), None)
