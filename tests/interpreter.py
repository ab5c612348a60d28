"""Triton's interpreter, which runs kernels where there is no GPU, in less time."""

import contextlib
import dataclasses
import importlib.util
import inspect
import math
import os

import pytest


@contextlib.contextmanager
def faster():
    """Triton's interpreter patches ``triton.language`` for each launch, and again for each call of a device function.

    That is a third of the time that tests of kernels take: here it happens once for each launch. What it patches,
    NumPy's names of dtypes, and the types and shapes of blocks, it finds once for all; and bf16 is half of fp32's bits.
    Blocks of one shape need no broadcast, and nothing reads whether integers overflow: asserts are off.
    """
    interpreter = None
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        yield
        return
    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin
    dtype_of, language = interpreter._get_np_dtype, {id(interpreter.tl), id(interpreter.tl.core)}
    patched, names, seen_by, dtypes, shapes, types, sizes_of = set(), {}, {}, {}, {}, {}, {}
    core, convert, init_block = interpreter.tl.core, interpreter._convert_float, interpreter.tl.core.block_type.__init__
    semantic = interpreter.interpreter_semantic
    broadcast, options = semantic.broadcast_impl_value, semantic.builder.options

    def patch_builtin(owner, builder, scope):
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        for name in names[owner]:
            if is_builtin(member := getattr(owner, name)):
                scope.set_attr(owner, name, of_kernels(getattr(member, "__wrapped__", member)))

    def of_kernels(function):
        def called(*args, **options):
            options["_semantic"] = semantic
            return function(*args, **options)

        return called

    def patch_once(function):
        seen = seen_by.get(function)
        if seen is None:
            seen = seen_by[function] = language & {id(value) for value in function.__globals__.values()}
        if seen <= patched:  # of a kernel that runs
            return interpreter._LangPatchScope()
        first, scope = not patched, patch(function)
        patched.update(seen)
        if first:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    def numpy_dtype(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    def convert_float(data, source, target, rounding):
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.astype("uint32") << 16
        if (source.name, target.name, rounding) == ("fp32", "bf16", None):  # to the nearest, as a GPU
            bits = data.view("uint32")
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")
        return convert(data, source, target, rounding)

    def init_tensor(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[sizes_of[id(type.shape)] if type.is_block() else ()]

    def init_type(block, element_ty, shape):
        sizes = sizes_of.get(id(shape)) or tuple([getattr(size, "value", size) for size in shape])
        if (element_ty.name, sizes) not in types:
            init_block(block, element_ty, shape)
            types[element_ty.name, sizes] = vars(block).copy()
            sizes_of[id(block.shape)] = sizes
            shapes[sizes] = shapes.get(sizes) or of_sizes(sizes)
        vars(block).update(types[element_ty.name, sizes], element_ty=element_ty)

    def of_sizes(sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def broadcast_others(one, other):
        return (one, other) if one.shape is other.shape else broadcast(one, other)

    shapes[()] = of_sizes(())
    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        context.setattr(interpreter, "_patch_builtin", patch_builtin)
        context.setattr(interpreter, "_patch_lang", patch_once)
        context.setattr(interpreter, "_convert_float", convert_float)
        context.setattr(core.tensor, "__init__", init_tensor)
        context.setattr(core.block_type, "__init__", init_type)
        context.setattr(semantic, "broadcast_impl_value", broadcast_others)
        context.setattr(semantic.builder, "options", dataclasses.replace(options, sanitize_overflow=False))
        yield


@contextlib.contextmanager
def small_tiles():
    """Tiles of 16 tokens and 32 columns, and rows by as many: in the interpreter, several of a GPU take long."""
    with pytest.MonkeyPatch.context() as context:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from liger_losses.kernels.targets import INTERPRETER, Tile

            tiles = {"by_descriptors": Tile(16, 32, 64, 8, 3), "by_pointers": Tile(16, 32, 32, 8, 3)}
            target = INTERPRETER._replace(tiling=INTERPRETER.tiling._replace(**tiles))
            context.setattr("liger_losses.chunked.accelerators.tiles.target_of", lambda device: target)
            context.setattr("liger_losses.kernels.divergence._BLOCK", 32)
        yield
