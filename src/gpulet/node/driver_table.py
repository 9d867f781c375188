"""Which file of a driver belongs to which driver capability: data, and nothing else.

Capabilities are those of NVIDIA_DRIVER_CAPABILITIES (NVIDIA container toolkit user guide). "" is for every container,
"all" only for one that asks for everything. Loaded by the programs in launch/.
"""

from __future__ import annotations

UTILITY, COMPUTE, VIDEO, GRAPHICS, NGX, EVERYTHING = "utility", "compute", "video", "graphics", "ngx", "all"

# Libraries named lib<name>.so.<driver version>.
LIBRARIES = {
    UTILITY: ("libnvidia-ml", "libnvidia-cfg", "libnvidia-nscq"),
    COMPUTE: (
        "libcuda",
        "libcudadebugger",
        "libnvidia-opencl",
        "libnvidia-gpucomp",
        "libnvidia-ptxjitcompiler",
        "libnvidia-fatbinaryloader",
        "libnvidia-allocator",
        "libnvidia-compiler",
        "libnvidia-pkcs11",
        "libnvidia-pkcs11-openssl3",
        "libnvidia-nvvm",
        "libnvidia-nvvm70",
        "libnvidia-tileiras",
    ),
    NGX: ("libnvidia-ngx",),
    VIDEO: ("libvdpau_nvidia", "libnvidia-encode", "libnvidia-opticalflow", "libnvcuvid"),
    GRAPHICS: (
        "libnvidia-eglcore",
        "libnvidia-glcore",
        "libnvidia-tls",
        "libnvidia-glsi",
        "libnvidia-fbc",
        "libnvidia-ifr",
        "libnvidia-rtcore",
        "libnvoptix",
        "libGLX_nvidia",
        "libEGL_nvidia",
        "libGLESv2_nvidia",
        "libGLESv1_CM_nvidia",
        "libnvidia-glvkspirv",
        "libnvidia-cbl",
        "libnvidia-vulkan-producer",
        "libnvidia-egl-gbm",
        "libnvidia-egl-wayland",
        "libnvidia-egl-wayland2",
        "libnvidia-egl-xcb",
        "libnvidia-egl-xlib",
    ),
}
CAPABILITY_OF_LIBRARY = {name: capability for capability, names in LIBRARIES.items() for name in names}

# What programs load to use a capability at all; a driver of any age has them, with 1 as the interface's version.
ESSENTIAL = {UTILITY: "libnvidia-ml", COMPUTE: "libcuda"}

# Libraries that have a version of their own instead of the driver's: any version is taken.
OWN_VERSION = (
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
    "libnvidia-nvvm70",
)

# What applications link with instead of a vendor's library (GLVND, the OpenCL loader, NVAPI). Images that draw bring
# their own as a rule.
NEUTRAL_LIBRARIES = (
    "libEGL",
    "libGL",
    "libGLESv1_CM",
    "libGLESv2",
    "libGLX",
    "libGLdispatch",
    "libOpenCL",
    "libOpenGL",
    "libnvidia-api",
)

# Libraries whose soname is their file name: no link leads to them, and none is needed.
SONAME_IS_FILE_NAME = (
    "libnvidia-eglcore",
    "libnvidia-glcore",
    "libnvidia-tls",
    "libnvidia-glsi",
    "libnvidia-rtcore",
    "libnvidia-glvkspirv",
    "libnvidia-gpucomp",
    "libnvidia-compiler",
    "libnvidia-fatbinaryloader",
)

# Links that programs expect and that ldconfig doesn't make: library -> (text, path relative to the library's folder);
# {file} is the library's file name.
EXTRA_LINKS = {
    "libcuda": (("libcuda.so.1", "libcuda.so"),),
    "libGLX_nvidia": (("{file}", "libGLX_indirect.so.0"),),
    "libnvidia-opticalflow": (("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"),),
    "libnvidia-allocator": (("../libnvidia-allocator.so.1", "gbm/nvidia-drm_gbm.so"),),
    "libnvidia-vulkan-producer": (("{file}", "libnvidia-vulkan-producer.so"),),
}

BINARIES = {
    "nvidia-smi": UTILITY,
    "nvidia-debugdump": UTILITY,
    "nvidia-persistenced": UTILITY,
    "nv-fabricmanager": UTILITY,
    "nvidia-cuda-mps-control": COMPUTE,
    "nvidia-cuda-mps-server": COMPUTE,
    "nvidia-imex": EVERYTHING,
    "nvidia-imex-ctl": EVERYTHING,
    "nvidia-xconfig": EVERYTHING,
}
BINARY_FOLDERS = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/run/current-system/sw/bin",  # NixOS
    "/usr/libexec/nvidia/tesla/bin",  # Bottlerocket
    "/opt/bin",  # Container-Optimized OS, beneath its driver folder
    "/bin/nvidia",
)

# What a running service offers. (capability, alternatives; the first that is there counts)
SOCKETS = (
    (UTILITY, ("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket")),
    (UTILITY, ("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket")),
    (COMPUTE, ("/tmp/nvidia-mps",)),
)

# Configuration: container path -> capability
_DATA, _LOCAL = "/usr/share", "/usr/local/share"
CONFIGURATION = {
    f"{_DATA}/glvnd/egl_vendor.d/10_nvidia.json": GRAPHICS,
    f"{_DATA}/egl/egl_external_platform.d/15_nvidia_gbm.json": GRAPHICS,
    f"{_DATA}/egl/egl_external_platform.d/10_nvidia_wayland.json": GRAPHICS,
    f"{_DATA}/egl/egl_external_platform.d/09_nvidia_wayland2.json": GRAPHICS,
    f"{_DATA}/egl/egl_external_platform.d/20_nvidia_xcb.json": GRAPHICS,
    f"{_DATA}/egl/egl_external_platform.d/20_nvidia_xlib.json": GRAPHICS,
    f"{_DATA}/nvidia/nvoptix.bin": GRAPHICS,
    f"{_DATA}/X11/xorg.conf.d/10-nvidia.conf": GRAPHICS,
    f"{_DATA}/X11/xorg.conf.d/nvidia-drm-outputclass.conf": GRAPHICS,
    "/etc/OpenCL/vendors/nvidia.icd": COMPUTE,
    "/etc/vulkan/icd.d/nvidia_icd.json": GRAPHICS,
    "/etc/vulkan/icd.d/nvidia_layers.json": GRAPHICS,
    "/etc/vulkan/implicit_layer.d/nvidia_layers.json": GRAPHICS,
    "/etc/vulkan/icd.d/nvidia_icd.x86_64.json": GRAPHICS,
    "/etc/vulkan/icd.d/nvidia_icd.aarch64.json": GRAPHICS,
}
CONFIGURATION_FOLDERS = ("/etc", _LOCAL, _DATA)  # the first that has the file counts

# X.Org modules: file ({version} is the driver's), link beside it; looked for in the driver's library folders' and the
# system's own module folders.
XORG_MODULES = (("nvidia_drv.so", ""), ("libglxserver_nvidia.so.{version}", "libglxserver_nvidia.so"))
XORG_BESIDE = (
    "nvidia/xorg",
    "xorg/modules/drivers",
    "xorg/modules/extensions",
    "xorg/modules/updates/drivers",
    "xorg/modules/updates/extensions",
)
XORG_FOLDERS = tuple(
    f"{base}/modules/{name}"
    for base in ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64")
    for name in ("drivers", "extensions", "updates/drivers", "updates/extensions")
)

FOLDERS_64 = (
    "/usr/lib64",
    "/usr/lib/{triplet}",
    "/usr/lib/{triplet}/nvidia/current",
    "/lib64",
    "/lib/{triplet}",
    "/lib/{triplet}/nvidia/current",
    "/run/opengl-driver/lib",  # NixOS
    "/usr/lib/wsl/lib",
    "/usr/lib/aarch64-linux-gnu/nvidia",  # Tegra
    "/lib",
    "/usr/lib",
)
FOLDERS_32 = (
    "/usr/lib/{triplet32}",
    "/usr/lib32",
    "/lib/{triplet32}",
    "/lib32",
    "/run/opengl-driver-32/lib",
    "/usr/lib",
)
TRIPLETS = {  # machine -> (64-bit, 32-bit companion)
    "x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
    "ppc64le": ("powerpc64le-linux-gnu", ""),
}
