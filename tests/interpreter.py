"""Triton's interpreter as tests use it: it rounds as a GPU rounds, and makes nothing twice."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quickened() -> Iterator[None]:
    """Round as a GPU rounds, and leave out what only costs time.

    By itself it cuts the lower bits of bfloat16 off, twice the error, all of it towards zero: the
    tests' limits are those of rounding. It also adds every sum a second time in 64 bits, to see
    whether 32 hold it (a fifth of the time), and makes the language its own anew for each launch
    and each function that a kernel calls (a quarter).
    """
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_patch = builder.cast_impl, interpreter._patch_lang
    scope_class = interpreter._LangPatchScope
    patched: dict[tuple[bool, bool], Any] = {}
    keys: dict[Any, tuple[bool, bool]] = {}

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, src, dst_type)
        values = np.ascontiguousarray(src.data, dtype=np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        kept = np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
        return interpreter.TensorHandle(kept, dst_type.scalar)

    def patch_lang(fn: Any) -> Any:
        """Nothing where what `fn` calls the language is patched already, for good."""
        key = keys.get(fn)
        if key is None:
            seen = [v for v in fn.__globals__.values() if inspect.ismodule(v)]
            key = keys[fn] = (any(v is tl for v in seen), any(v is tl.core for v in seen))
        if key not in patched:
            patched[key] = plain_patch(fn)
        return scope_class()

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        _remember_types(patch)
        _check_types_once(patch)
        _call_directly(patch)
        patch.setattr(builder, "cast_impl", cast_impl)
        patch.setattr(interpreter, "_patch_lang", patch_lang)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
        for scope in reversed(patched.values()):
            scope.restore()


def _remember_types(patch: pytest.MonkeyPatch) -> None:
    """Have types of the language made once, not at every operation: half of the interpreter's time.

    Blocks of one shape and element share what they are made of, as do tensors of one type.
    """
    core, semantic = tl.core, tl.semantic.TritonSemantic
    plain_block, plain_tensor = core.block_type.__init__, core.tensor.__init__
    plain_unwrap, plain_broadcast = core._unwrap_if_constexpr, semantic.broadcast_impl_value
    plain_numpy = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    plain_kinds: set[type] = {int}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *(s if type(s) is int else s.value for s in shape))
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = self.__dict__  # holds the element: its id stays its own
        self.__dict__ = blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        made = type.__dict__.get("made_tensor")
        if made is None:
            plain_tensor(self, handle, type)
            own = self.__dict__.items()
            type.made_tensor = {k: v for k, v in own if k not in ("handle", "type")}
        else:
            self.__dict__.update(made)
            self.handle, self.type = handle, type

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain_kinds:
            return value
        if kind is tl.constexpr:
            return value.value
        if not issubclass(kind, (list, tuple, tl.core.tuple, tl.constexpr)):
            plain_kinds.add(kind)
        return plain_unwrap(value)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        mine, other = lhs.type, rhs.type
        if mine.is_block() and other.is_block() and mine.shape.values == other.shape.values:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    def numpy_type(kind: Any) -> Any:
        if "numpy_type" not in kind.__dict__:
            kind.numpy_type = plain_numpy(kind)
        return kind.numpy_type

    patch.setattr(core.block_type, "__init__", make_block)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap)
    patch.setattr(semantic, "broadcast_impl_value", broadcast)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    # Whether numpy's numbers are no wider than the type's: the interpreter's own affair.
    patch.setattr(interpreter.TensorHandle, "__post_init__", lambda handle: None)


def _check_types_once(patch: pytest.MonkeyPatch) -> None:
    """Have operands that keep their numbers typed as before, and constants beside blocks made once.

    Blocks of one type share what they are made of, see above: its identity is that of the type.
    """
    semantic, dtype = tl.semantic.TritonSemantic, tl.core.dtype
    plain, plain_equal = semantic.binary_op_type_checking_impl, dtype.__eq__
    tensor, block_type = tl.core.tensor, tl.core.block_type
    constants: dict[Any, Any] = {}
    pairs: dict[Any, Any] = {}
    check = _spread_by_numpy(patch, plain)

    def checked(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> Any:
        if type(lhs) is not tensor:
            return check(self, lhs, rhs, *how, **more)
        mine, other = lhs.type, type(rhs)
        if other is tensor:
            theirs = rhs.type
            key = (id(mine.__dict__), id(theirs.__dict__), how, *more.items())
            if key not in pairs:
                found = check(self, lhs, rhs, *how, **more)
                if found[0].handle is not lhs.handle or found[1].handle is not rhs.handle:
                    return found
                pairs[key] = found[0].type, found[1].type, mine, theirs  # their ids stay their own
            one, two, *_ = pairs[key]
            return (
                lhs if one.__dict__ is mine.__dict__ else tensor(lhs.handle, one),
                rhs if two.__dict__ is theirs.__dict__ else tensor(rhs.handle, two),
            )
        elif type(mine) is block_type and (other is int or other is float):
            number = rhs if other is int else repr(rhs)
            key = (id(mine.__dict__), number, how, *more.items())
            if key not in constants:
                found = check(self, lhs, rhs, *how, **more)
                if found[0] is not lhs:
                    return found
                found[1].handle.data.flags.writeable = False  # it is everybody's
                constants[key] = found[1]
            return lhs, constants[key]
        return check(self, lhs, rhs, *how, **more)

    def equal(self: Any, other: Any) -> bool:
        return self is other or plain_equal(self, other)

    patch.setattr(semantic, "binary_op_type_checking_impl", checked)
    patch.setattr(dtype, "__eq__", equal)


def _spread_by_numpy(patch: pytest.MonkeyPatch, plain: Any) -> Any:
    """Return `plain` with operands of unlike shapes typed as one, their numbers left as they are.

    numpy spreads them as it computes. What is asked for elsewhere (`tl.where`) is spread for real.
    """
    semantic, tensor = tl.semantic.TritonSemantic, tl.core.tensor
    spread = semantic.broadcast_impl_value
    asked: list[bool] = []

    def check(*given: Any, **more: Any) -> Any:
        asked.append(True)
        try:
            return plain(*given, **more)
        finally:
            asked.pop()

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = spread(self, lhs, rhs)
        if not asked:
            return one, two
        return (
            lhs if one.type.__dict__ is lhs.type.__dict__ else tensor(lhs.handle, one.type),
            rhs if two.type.__dict__ is rhs.type.__dict__ else tensor(rhs.handle, two.type),
        )

    patch.setattr(semantic, "broadcast_impl_value", broadcast)
    return check


def _call_directly(patch: pytest.MonkeyPatch) -> None:
    """Have the language's functions called without the wrapper that asks for a compiler."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner, semantic = member, interpreter.interpreter_semantic
        while tl.core.is_builtin(inner) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__

        def called(*args: Any, **more: Any) -> Any:
            more["_semantic"] = semantic
            return inner(*args, **more)

        scope.set_attr(obj, name, called)

    patch.setattr(interpreter, "_patch_attr", patch_attr)
