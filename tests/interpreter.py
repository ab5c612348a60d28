"""Triton's interpreter, which runs kernels where there is no GPU, in less time."""

import contextlib
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
    """
    interpreter = None
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        yield
        return
    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin
    dtype_of, language = interpreter._get_np_dtype, {id(interpreter.tl), id(interpreter.tl.core)}
    patched, names, seen_by, dtypes, shapes, types = set(), {}, {}, {}, {}, {}
    core, convert, init_block = interpreter.tl.core, interpreter._convert_float, interpreter.tl.core.block_type.__init__

    def patch_builtin(owner, builder, scope):
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        for name in names[owner]:
            if is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, builder, scope)

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
        if (source.name, target.name, rounding) == ("fp32", "bf16", None):
            return (data.view("uint32") >> 16).astype("uint16")
        return convert(data, source, target, rounding)

    def init_tensor(tensor, handle, type):
        shape = (*type.shape,) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[shape]

    def init_type(block, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            init_block(block, element_ty, shape)
            types[key] = vars(block).copy()
        vars(block).update(types[key], element_ty=element_ty)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        context.setattr(interpreter, "_patch_builtin", patch_builtin)
        context.setattr(interpreter, "_patch_lang", patch_once)
        context.setattr(interpreter, "_convert_float", convert_float)
        context.setattr(core.tensor, "__init__", init_tensor)
        context.setattr(core.block_type, "__init__", init_type)
        yield


@contextlib.contextmanager
def small_tiles():
    """Tiles of 16 tokens and 32 columns: in the interpreter, the tokens of several tiles of a GPU take long."""
    with pytest.MonkeyPatch.context() as context:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from liger_losses.kernels.targets import INTERPRETER, Tile

            tiles = {"by_descriptors": Tile(16, 32, 64, 8, 3), "by_pointers": Tile(16, 32, 32, 8, 3)}
            target = INTERPRETER._replace(tiling=INTERPRETER.tiling._replace(**tiles))
            context.setattr("liger_losses.kernels._tiles.target_of", lambda device: target)
        yield
