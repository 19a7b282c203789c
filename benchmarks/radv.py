"""Registers and instructions of the vulkan target's kernels on an AMD GPU, as Markdown: no GPU is needed.

Mesa's driver for AMD (RADV) compiles for a GPU that the machine does not have, and tells what its compiler
made of each kernel:

    RADV_FORCE_FAMILY=gfx1100 python benchmarks/radv.py [--shape olmoe-1b-7b …] [--class discrete]

A line is a kernel of a layer, in steps of one row and of 256; q4 in groups of 64, the f16 program. Needs Mesa
up to 25 with its Vulkan drivers; where the machine has other drivers, too, name RADV's in VK_DRIVER_FILES
(VK_ICD_FILENAMES for older loaders).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import vulkan as vk

from nearfar.build.synth import shape_names
from nearfar.targets.gpu.classes import CLASSES
from nearfar.targets.vulkan.codegen import Module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.published_kernels import layer_modules

EXTENSION = "VK_KHR_pipeline_executable_properties"
CAPTURE = 0x40
"""VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR."""
COLUMNS = {
    "VGPRs": "registers",
    "Spilled VGPRs": "spilled",
    "LDS size": "workgroup memory, bytes",
    "Subgroups per SIMD": "subgroups a SIMD",
    "Instructions": "instructions",
    "Code size": "bytes of code",
}
"""The columns, by RADV's names of its statistics."""


class Compiler:
    """RADV for the GPU of RADV_FORCE_FAMILY."""

    def __init__(self) -> None:
        if "RADV_FORCE_FAMILY" not in os.environ:
            raise SystemExit("RADV_FORCE_FAMILY is not set: name a GPU's family in it, such as gfx1100")
        version = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 3, 0))
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=version), None)
        found = {
            vk.vkGetPhysicalDeviceProperties(gpu).deviceName: gpu
            for gpu in vk.vkEnumeratePhysicalDevices(instance)
        }
        self.name = next((name for name in found if "RADV" in name), "")
        if not self.name:
            raise SystemExit(
                f"no device of RADV among {list(found)}: install Mesa's Vulkan drivers, up to version 25"
            )
        later = vk.VkPhysicalDeviceVulkan12Features(
            shaderFloat16=1, storageBuffer8BitAccess=1, vulkanMemoryModel=1, vulkanMemoryModelDeviceScope=1
        )
        wide = vk.VkPhysicalDeviceVulkan11Features(storageBuffer16BitAccess=1, pNext=later)
        told = vk.VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR(
            pipelineExecutableInfo=1, pNext=wide
        )
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, pQueuePriorities=[1.0])
        self._device = vk.vkCreateDevice(
            found[self.name],
            vk.VkDeviceCreateInfo(pNext=told, pQueueCreateInfos=[queue], ppEnabledExtensionNames=[EXTENSION]),
            None,
        )
        self._statistics = vk.vkGetDeviceProcAddr(self._device, "vkGetPipelineExecutableStatisticsKHR")

    def statistics(self, module: Module) -> Mapping[str, int]:
        """What the compiler tells of a kernel, by RADV's names."""
        pipeline = self._pipeline(module)
        shader = vk.VkPipelineExecutableInfoKHR(pipeline=pipeline, executableIndex=0)
        return {_text(each.name): each.value.u64 for each in self._statistics(self._device, shader)}

    def _pipeline(self, module: Module) -> Any:
        code = vk.VkShaderModuleCreateInfo(codeSize=len(module.code), pCode=module.code)
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i,
                descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                descriptorCount=1,
                stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            )
            for i in range(len(module.access))
        ]
        sets = vk.vkCreateDescriptorSetLayout(
            self._device, vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings), None
        )
        layout = vk.vkCreatePipelineLayout(
            self._device, vk.VkPipelineLayoutCreateInfo(pSetLayouts=[sets]), None
        )
        sizes = vk.ffi.new("uint32_t[3]", list(module.workgroup))
        entries = [vk.VkSpecializationMapEntry(constantID=i, offset=4 * i, size=4) for i in range(3)]
        stage = vk.VkPipelineShaderStageCreateInfo(
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            module=vk.vkCreateShaderModule(self._device, code, None),
            pName=module.entry,
            pSpecializationInfo=vk.VkSpecializationInfo(pMapEntries=entries, dataSize=12, pData=sizes),
        )
        info = vk.VkComputePipelineCreateInfo(flags=CAPTURE, stage=stage, layout=layout, basePipelineIndex=-1)
        return next(iter(vk.vkCreateComputePipelines(self._device, None, 1, [info], None)))


def _text(name: Any) -> str:
    return name if isinstance(name, str) else str(vk.ffi.string(name).decode())


def table(modules: Mapping[str, Module], compiler: Compiler) -> Iterator[str]:
    """The lines of the Markdown table."""
    yield f"| kernel | {' | '.join(COLUMNS.values())} |"
    yield f"| --- | {' | '.join(['---:'] * len(COLUMNS))} |"
    for name, module in modules.items():
        found = compiler.statistics(module)
        yield f"| {name} | {' | '.join(f'{found[key]:,}' for key in COLUMNS)} |"


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=shape_names(), help="default: olmoe-1b-7b")
    parser.add_argument("--class", dest="device", choices=list(CLASSES), default="discrete")
    arguments = parser.parse_args()
    compiler = Compiler()
    for shape in arguments.shape or ["olmoe-1b-7b"]:
        print(f"### {shape}, class {arguments.device}, {compiler.name}\n")
        print(
            "\n".join(table(layer_modules(shape, CLASSES[arguments.device]), compiler)),
            end="\n\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the compiler's objects are not freed one by one
