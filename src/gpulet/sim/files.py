"""Which files a driver brings, as tables: their names, DT_SONAMEs and the links beside them.

Names as the Linux driver packages of the 535 to 580 series install them.
"""

from __future__ import annotations

import json

# name of the library, DT_SONAME ("" where it is the file's own name: libraries that only other driver libraries load,
# by their full versioned name), further links (name -> target) in the same folder
LIBRARIES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("libcuda", "libcuda.so.1", {"libcuda.so": "libcuda.so.1"}),
    ("libcudadebugger", "libcudadebugger.so.1", {}),
    ("libnvidia-ml", "libnvidia-ml.so.1", {"libnvidia-ml.so": "libnvidia-ml.so.1"}),
    ("libnvidia-cfg", "libnvidia-cfg.so.1", {"libnvidia-cfg.so": "libnvidia-cfg.so.1"}),
    ("libnvidia-nscq", "libnvidia-nscq.so.2", {"libnvidia-nscq.so": "libnvidia-nscq.so.2"}),
    (
        "libnvidia-ptxjitcompiler",
        "libnvidia-ptxjitcompiler.so.1",
        {"libnvidia-ptxjitcompiler.so": "libnvidia-ptxjitcompiler.so.1"},
    ),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4", {"libnvidia-nvvm.so": "libnvidia-nvvm.so.4"}),
    ("libnvidia-opencl", "libnvidia-opencl.so.1", {}),
    ("libnvidia-gpucomp", "", {}),
    ("libnvidia-allocator", "libnvidia-allocator.so.1", {"libnvidia-allocator.so": "libnvidia-allocator.so.1"}),
    ("libnvidia-pkcs11", "", {}),
    ("libnvidia-pkcs11-openssl3", "", {}),
    ("libnvidia-sandboxutils", "libnvidia-sandboxutils.so.1", {}),
    ("libnvidia-encode", "libnvidia-encode.so.1", {"libnvidia-encode.so": "libnvidia-encode.so.1"}),
    ("libnvcuvid", "libnvcuvid.so.1", {"libnvcuvid.so": "libnvcuvid.so.1"}),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so.1", {"libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1"}),
    ("libnvidia-glcore", "", {}),
    ("libnvidia-eglcore", "", {}),
    ("libnvidia-glsi", "", {}),
    ("libnvidia-tls", "", {}),
    ("libnvidia-glvkspirv", "", {}),
    ("libnvidia-rtcore", "", {}),
    ("libnvidia-fbc", "libnvidia-fbc.so.1", {"libnvidia-fbc.so": "libnvidia-fbc.so.1"}),
    ("libnvidia-ngx", "libnvidia-ngx.so.1", {}),
    ("libnvoptix", "libnvoptix.so.1", {}),
    ("libnvidia-vulkan-producer", "", {}),
    ("libnvidia-present", "", {}),
    ("libnvidia-gtk3", "", {}),
    ("libnvidia-wayland-client", "", {}),
    ("libGLX_nvidia", "libGLX_nvidia.so.0", {"libGLX_indirect.so.0": "libGLX_nvidia.so.0"}),
    ("libEGL_nvidia", "libEGL_nvidia.so.0", {}),
    ("libGLESv2_nvidia", "libGLESv2_nvidia.so.2", {}),
    ("libGLESv1_CM_nvidia", "libGLESv1_CM_nvidia.so.1", {}),
    ("vdpau/libvdpau_nvidia", "libvdpau_nvidia.so.1", {"libvdpau_nvidia.so": "libvdpau_nvidia.so.1"}),
)

# the driver's 32-bit companions
LIBRARIES_32 = (
    "libcuda",
    "libnvidia-ml",
    "libnvidia-ptxjitcompiler",
    "libnvidia-opencl",
    "libnvidia-gpucomp",
    "libnvidia-allocator",
    "libnvidia-encode",
    "libnvcuvid",
    "libnvidia-opticalflow",
    "libnvidia-glcore",
    "libnvidia-eglcore",
    "libnvidia-glsi",
    "libnvidia-tls",
    "libnvidia-glvkspirv",
    "libnvidia-fbc",
    "libGLX_nvidia",
    "libEGL_nvidia",
    "libGLESv2_nvidia",
    "libGLESv1_CM_nvidia",
    "vdpau/libvdpau_nvidia",
)

# libraries with a version of their own: file name, DT_SONAME
OTHERS = (
    ("libnvidia-egl-gbm.so.1.1.2", "libnvidia-egl-gbm.so.1"),
    ("libnvidia-egl-wayland.so.1.1.18", "libnvidia-egl-wayland.so.1"),
    ("libnvidia-egl-xcb.so.1.0.0", "libnvidia-egl-xcb.so.1"),
    ("libnvidia-egl-xlib.so.1.0.0", "libnvidia-egl-xlib.so.1"),
    ("libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4"),
)

# what other packages bring (GLVND, the OpenCL loader): there on most machines, and not the driver's to give away
COMPANY = (
    ("libGL.so.1.7.0", "libGL.so.1"),
    ("libGLX.so.0.0.0", "libGLX.so.0"),
    ("libEGL.so.1.1.0", "libEGL.so.1"),
    ("libGLdispatch.so.0.0.0", "libGLdispatch.so.0"),
    ("libOpenGL.so.0.0.0", "libOpenGL.so.0"),
    ("libOpenCL.so.1.0.0", "libOpenCL.so.1"),
)

# programs; those of the first table are C sources of this folder
PROGRAMS = {"nvidia-smi": "smi.c", "nvidia-cuda-mps-control": "mps.c"}
SCRIPTS = (
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-server",
    "nvidia-xconfig",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-modprobe",
)
FABRIC_SCRIPT = "nv-fabricmanager"

FIRMWARE = ("gsp_ga10x.bin", "gsp_tu10x.bin")


def _icd(library: str) -> str:
    """A loader's manifest that names one library, as Vulkan's, GLVND's and EGL's loaders read it."""
    return json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": library}}) + "\n"


EGL_PLATFORMS = {
    "10_nvidia_wayland": "libnvidia-egl-wayland.so.1",
    "15_nvidia_gbm": "libnvidia-egl-gbm.so.1",
    "20_nvidia_xcb": "libnvidia-egl-xcb.so.1",
    "20_nvidia_xlib": "libnvidia-egl-xlib.so.1",
}

# Windows Subsystem for Linux: what a driver store holds (file name, DT_SONAME), and what the system puts beside it
WSL_LIBRARIES = (
    ("libcuda.so.1.1", "libcuda.so.1"),
    ("libcuda_loader.so", "libcuda_loader.so"),
    ("libnvidia-ptxjitcompiler.so.1", "libnvidia-ptxjitcompiler.so.1"),
    ("libnvidia-ml_loader.so", "libnvidia-ml_loader.so"),
    ("libnvdxgdmal.so.1", "libnvdxgdmal.so.1"),
)
WSL_HOST_LIBRARIES = ("libd3d12.so", "libd3d12core.so")

TEGRA_DRIVER = "540.4.0"

# Tegra: file name, DT_SONAME; and the device nodes that its CSV file lists
TEGRA_LIBRARIES = (
    ("libcuda.so.1.1", "libcuda.so.1"),
    ("libnvrm_gpu.so", "libnvrm_gpu.so"),
    ("libnvrm_mem.so", "libnvrm_mem.so"),
    ("libnvos.so", "libnvos.so"),
    (f"libnvidia-ptxjitcompiler.so.{TEGRA_DRIVER}", "libnvidia-ptxjitcompiler.so.1"),
    (f"libnvidia-nvvm.so.{TEGRA_DRIVER}", "libnvidia-nvvm.so.4"),
)
TEGRA_DEVICES = ("nvmap", "nvhost-gpu", "nvhost-ctrl-gpu", "nvhost-as-gpu", "nvgpu/igpu0/ctrl")

# configuration, path under the root -> text
CONFIGURATION = {
    "etc/OpenCL/vendors/nvidia.icd": "libnvidia-opencl.so.1\n",
    "etc/vulkan/icd.d/nvidia_icd.json": _icd("libGLX_nvidia.so.0"),
    "etc/vulkan/implicit_layer.d/nvidia_layers.json": '{"file_format_version": "1.0.0", "layers": []}\n',
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json": _icd("libEGL_nvidia.so.0"),
    **{f"usr/share/egl/egl_external_platform.d/{name}.json": _icd(library) for name, library in EGL_PLATFORMS.items()},
    "usr/share/nvidia/nvoptix.bin": "simulated\n",
    "usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf": (
        'Section "OutputClass"\n    Identifier "nvidia"\n'
        '    MatchDriver "nvidia-drm"\n    Driver "nvidia"\nEndSection\n'
    ),
}
