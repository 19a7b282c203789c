"""Targets that TVM compiles: plans over our own kernels, and a weight stream packed for them (cpu, wasm,
webgpu, vulkan).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tvm

from nearfar.build import manifest
from nearfar.build.browser.check import check_text
from nearfar.build.options import BuildOptions
from nearfar.build.program.beside import Share, beside, shares
from nearfar.build.program.compile import Compilation, check_supported, compiled
from nearfar.build.program.compiled import Compiled
from nearfar.build.program.fingerprint import fingerprint
from nearfar.build.program.kept import KernelCache, ObjectCache
from nearfar.build.source import Source
from nearfar.build.targets.target import KernelCounts, Made, OverFiles, Programs, Tell, check_kv_bits
from nearfar.build.weights.shards import SHARD_BYTES, ShardWriter
from nearfar.build.weights.stream import MatrixRows
from nearfar.errors import BuildError
from nearfar.format.kv import UNIT, group_size, rounding
from nearfar.format.manifest import Weights
from nearfar.kernels.bundles import Bundles
from nearfar.kernels.contract import Packing, Products, Variant
from nearfar.kernels.emission import EmitContext
from nearfar.kernels.planned import Planned
from nearfar.kernels.quantized import Matrix, QuantPieces
from nearfar.step.config import LARGEST
from nearfar.step.params import Param

_NONE = np.zeros(0, np.float32)


class PackedWriter(OverFiles):
    """Packs whole matrices as a target's kernels want them, and appends them to its weight stream.

    `finish` appends the `bundles`: tensors that join several vectors, which are kept in memory until then.
    """

    def __init__(self, packing: Packing, shards: ShardWriter, bundles: Bundles) -> None:
        super().__init__(shards)
        self._packing, self._shards, self._bundles = packing, shards, bundles
        self._kept: dict[str, npt.NDArray[np.float32]] = dict.fromkeys(chain(*bundles.values()), _NONE)

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """Write a vector in float32, with its folded factor."""
        self.add(param.name, param.folded(values))

    def add(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Write a float32 vector unchanged."""
        self._shards.add(name, values)
        if name in self._kept:
            self._kept[name] = values

    def matrix(self, param: Param, matrix: Matrix, tensor: MatrixRows | QuantPieces) -> None:
        """Write a matrix in the parts that the kernels read, its rows in the step's order."""
        if param.order is not None:
            tensor = tensor[np.array(param.order)]
        packed = self._packing.pack(matrix, tensor)
        for part, array in zip(self._packing.parts(matrix), packed, strict=True):
            self._shards.add(f"{param.name}.{part.name}", array)

    def finish(self) -> Weights:
        """The manifest's `weights`."""
        for name, held in self._bundles.items():
            self._shards.add(name, np.concatenate([self._kept[each] for each in held]))
        shards, tensors = self._shards.finish()
        return Weights(sum(shard.bytes for shard in shards), SHARD_BYTES, shards, tensors)


class PlannedTarget(Planned):
    """The pipeline's side of a target with our own kernels; see nearfar.build.targets.target.Target."""

    def check(self, source: Source, options: BuildOptions) -> None:
        """Raise BuildError where a kernel is missing, a matrix exceeds the kernels' addresses, or, for
        browsers, the web engine does not follow the tokenizer or chat template.
        """
        if self.bundled:
            check_text(self.name, source.checkpoint)
        self._check_products(source, options)
        self._check_kv(source, options)
        for name, matrix in source.matrices.items():
            largest = max(math.prod(part.shape) for part in self.packing.parts(matrix))
            if largest > LARGEST:
                raise BuildError(
                    f"{name} [{matrix.n}, {matrix.k}] takes {largest:,} values, more than target "
                    f"{self.name} can address ({LARGEST:,}): quantize it (--quant q4)"
                )
        check_supported(self._job(source, options), self._asked(options))

    def _check_products(self, source: Source, options: BuildOptions) -> None:
        """Raise BuildError where the options leave no program, or ask for int8 and no matrix can use it."""
        asked = self._asked(options)
        if not asked:
            raise BuildError(
                f"target {self.name} has no program with products of {', '.join(options.multiplied_as)} for "
                f"class {', '.join(options.device_classes)}: add float to --products, or a class to "
                "--device-class"
            )
        rounding = any(variant.products == "int8" for variant in asked)
        if rounding and not any(self.int8_products(matrix) for matrix in source.matrices.values()):
            raise BuildError(
                "--products int8 is for matrices of 2, 4 or 8 bits in groups of 32 or more, and this model "
                "has none: choose such a --quant and --group-size, or leave int8 out"
            )

    def _check_kv(self, source: Source, options: BuildOptions) -> None:
        """Raise BuildError where the target lacks a requested cache dtype, or the model's head_dim does not
        fit it.
        """
        check_kv_bits(self.name, options)
        for bits in options.kv_bits:
            for cache in source.model.step.caches if bits != 16 else ():
                if cache.parts == "kv" and group_size(cache.head_dim, bits) is None:
                    raise BuildError(
                        f"--kv-bits {bits}: heads of {cache.head_dim} values cannot be cut into groups of "
                        f"{UNIT}, so this model's cache cannot be quantized: leave it out"
                    )

    def products(self, options: BuildOptions) -> set[Products]:
        """See Target.products."""
        return {variant.products for variant in self._asked(options)}

    def _asked(self, options: BuildOptions) -> list[Variant]:
        """The target's variants that the options select, by device class and products."""
        return [
            variant
            for variant in self.variants(options)
            if variant.device_class is None
            or (variant.device_class in options.device_classes and variant.products in options.multiplied_as)
        ]

    def _job(self, source: Source, options: BuildOptions) -> Compilation:
        """The input of each variant's compilation."""
        return Compilation(source.model, source.matrices, manifest.CACHE, options.buckets or self.buckets)

    def writer(self, source: Source, root: Path, options: BuildOptions) -> PackedWriter:
        """A writer of the weight stream, which begins with the frequencies of the rotations and the rounding
        of keys.
        """
        shards = ShardWriter(root)
        for name, frequencies in manifest.rope_tensors(source.model.step).items():
            shards.add(name, np.array(frequencies, np.float32))
        bundles = self.packing.bundles(source.model.step, rounds_keys=bool(source.rounding))
        writer = PackedWriter(self.packing, shards, bundles)
        for cache, weights in source.rounding.items():
            writer.add(rounding(cache), weights.reshape(-1))
        return writer

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        """Compile a program for each selected variant, or take it from the kernel cache."""
        cache = KernelCache() if options.kernel_cache else None
        objects = ObjectCache.beside(cache) if cache else None
        context = EmitContext(
            root=Path(),
            buffers={buffer.name: buffer for buffer in manifest.buffers(source.model)},
            largest_weight=self._largest_weight(source),
            figures=options.kernel_figures,
            keep=objects,
        )
        job = self._job(source, options)
        asked = self._asked(options)
        keys = {variant.name: self._key(job, variant, context) for variant in asked} if cache else {}
        kept = {name: found for name, key in keys.items() if cache and (found := cache.get(key))}
        if options.dump_ir is not None:
            kept = {}
        left = [each for each in asked if each.name not in kept]
        counted = Counted(tell, [_kernels({"": program}) for program in kept.values()], len(asked))
        made = self._compile(job, left, context, options.dump_ir, counted)
        for name, program in made.items():
            if cache is not None:
                cache.put(keys[name], program)
        if objects is not None and made:
            objects.trim()
        programs = _apart((kept | made)[variant.name] for variant in asked)
        return Programs(programs, KernelCounts(_kernels(kept), _kernels(made)))

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """Write the programs' and the tokenizer's files."""
        for each in programs.compiled:
            each.write(root)
        records = tuple(each.record for each in programs.compiled)
        twins = tuple(self.twin(root, record) for record in records) if self.twin else ()
        return Made(
            manifest.stream_ropes(source.model.step),
            twins + records,
            source.checkpoint.write_tokenizer(root / "tokenizer"),
            bundled=self.bundled,
        )

    def _largest_weight(self, source: Source) -> int:
        """Bytes of the largest tensor that `writer` writes."""
        parts = [part for matrix in source.matrices.values() for part in self.packing.parts(matrix)]
        vectors = {param.name: source.bytes_of(param) for param in source.params if not param.is_matrix}
        vectors |= {rounding(cache): weights.nbytes for cache, weights in source.rounding.items()}
        bundles = self.packing.bundles(source.model.step, rounds_keys=bool(source.rounding)).values()
        ropes = [4 * len(rope.inv_freq) for rope in source.model.step.ropes.values()]
        sizes = [part.bytes for part in parts] + [sum(vectors[name] for name in held) for held in bundles]
        return max([*sizes, *vectors.values(), *ropes], default=0)

    def _key(self, job: Compilation, variant: Variant, context: EmitContext) -> str:
        """The kernel cache's key of a variant's program: the fingerprint of its input and of the code that
        makes it.
        """
        target = str(tvm.target.Target(self.tvm_target))
        given = context.buffers, context.largest_weight, context.figures
        return fingerprint(compiled, self.name, self.emit, target, job, variant, given)

    def _compile(
        self,
        job: Compilation,
        variants: Sequence[Variant],
        context: EmitContext,
        dump: Path | None,
        counted: Counted,
    ) -> dict[str, Compiled]:
        """Compile the variants' programs, by name. Those of several device classes are compiled in as many
        processes as there are processors. `dump`: a folder for the module after each pass.
        """
        here, *others = shares(variants) if dump is None else [tuple(variants)]
        with ExitStack() as stack:
            given = [Share(self.tvm_target, self.emit, job, each, context) for each in others]
            waits = [stack.enter_context(beside(share)) for share in given]
            made: list[Compiled] = []
            counted.within(0, 0)
            shown = dataclasses.replace(context, told=counted.within)
            for variant in here:
                made.append(self.compiled(job, variant, shown, dump))
                counted.made(made[-1:])
            for wait in waits:
                others_made = wait()
                counted.made(others_made)
                made += others_made
        return {each.record.name: each for each in made}

    def compiled(
        self, job: Compilation, variant: Variant, context: EmitContext, dump: Path | None = None
    ) -> Compiled:
        """Compile a variant's program; nothing is written to the artifact."""
        where = dump / self.name / variant.name if dump is not None else None
        return compiled(job, variant, tvm.target.Target(self.tvm_target), self.emit, context, where)


class Counted:
    """Reports how many of a target's kernels are made. A program that was not begun yet counts with the mean
    number of kernels of the known ones; where none is known, the report is 0 of 0.
    """

    def __init__(self, tell: Tell, known: Sequence[int], programs: int) -> None:
        """`known`: the kernels of the programs that are there; `programs`: how many there will be."""
        self._tell, self._known, self._programs = tell, list(known), programs

    def made(self, programs: Sequence[Compiled]) -> None:
        """Report that these programs are compiled."""
        self._known += [len(program.record.kernels) for program in programs]
        self.within(0, 0)

    def within(self, done: int, total: int) -> None:
        """Report that `done` of the `total` kernels of the current program are compiled."""
        known = [*self._known, *([total] if total else [])]
        left = self._programs - len(known)
        average = round(sum(known) / len(known)) if known else 0
        self._tell(sum(self._known) + done, sum(known) + left * average)


def _apart(programs: Iterable[Compiled]) -> tuple[Compiled, ...]:
    """Drop programs identical to an earlier one of the same device class.

    An int8 program equals the float one when its steps are too small, or its matrices unsuitable, for int8; a
    device should not spend a trial on it.
    """
    found: dict[object, Compiled] = {}
    for program in programs:
        record = program.record
        shaders = frozenset(kernel.sha256 for kernel in record.kernels.values())
        found.setdefault((record.device_class, record.library_sha256, shaders), program)
    return tuple(found.values())


def _kernels(programs: Mapping[str, Compiled]) -> int:
    return sum(len(program.record.kernels) for program in programs.values())
