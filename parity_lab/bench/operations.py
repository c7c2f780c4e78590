"""Operations of a run, counted: kernels by name, copies of tensors, and waits of the host for the
device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

MARK = "mha-parity: a run"


@dataclass(frozen=True)
class Operations:
    """Counts of one run.

    Attributes:
        kernels: number of calls of each kernel: on a device as torch's profiler counts them, on a
            CPU the operations of ATen that are implemented for it, in JAX the fusions and custom
            calls of the compiled program.
        copies: tensors that are copied to a different layout, dtype or device.
        syncs: points at which the host waits for values of the device.
    """

    kernels: Mapping[str, int]
    copies: int
    syncs: int


# ---- torch ---------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An event of torch's profiler, with those that it called."""

    name: str
    is_on_device: bool = False
    children: tuple[Event, ...] = ()


_WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize$")
_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
}
"""Operations that return values, or a shape that depends on them: on a GPU the host waits for
these.
"""
_MAKES_MEMORY = re.compile(r"aten::((new_)?empty|(as_strided|set|resize)_$|_unsafe_view)")
"""Operations that return memory without values, or other memory, and compute nothing."""


def operations_of_events(events: Iterable[Event]) -> Operations:
    """Return the counts of a profile, given as its outermost events.

    Events of a device count as kernels if there are any, and the calls of its driver as waits.
    Otherwise operations of ATen count as kernels if they compute and are not composed of others,
    and as waits if they read values.
    """
    outermost = tuple(events)
    all_events: list[Event] = []
    for event in outermost:
        all_events += _with_descendants(event)
    num_copies = sum(event.name == "aten::copy_" for event in all_events)

    kernels: Counter[str] = Counter()
    if any(event.is_on_device for event in all_events):
        for event in all_events:
            # Transfers are on the device, and no kernels.
            if event.is_on_device and not event.name.startswith(("Memcpy", "Memset")):
                kernels[event.name] += 1
        num_waits = sum(_WAITS.match(event.name) is not None for event in all_events)
    else:
        for event in outermost:
            kernels.update(_operations(event))
        num_waits = sum(_num_reads(event) for event in outermost)
    return Operations(dict(kernels), copies=num_copies, syncs=num_waits)


def _with_descendants(event: Event) -> Iterator[Event]:
    yield event
    for child in event.children:
        yield from _with_descendants(child)


def _num_reads(event: Event) -> int:
    """Return the number of reads of values within an event; a read that consists of others counts
    once.
    """
    if event.name in _READS:
        return 1
    return sum(_num_reads(child) for child in event.children)


def _operations(event: Event) -> list[str]:
    """Return the names of the outermost operations within an event that compute and are not
    composed of others.
    """
    if event.name.startswith("aten::") and not _is_composed(event.name):
        return [event.name] if _computes(event.name) else []
    names = []
    for child in event.children:
        names += _operations(child)
    return names


@cache
def _is_composed(name: str) -> bool:
    """Return whether ATen composes an operation of others on every device."""
    from torch._C import DispatchKey

    key = DispatchKey.CompositeImplicitAutograd
    return any(overload.has_kernel_for_dispatch_key(key) for overload in _overloads(name))


@cache
def _computes(name: str) -> bool:
    """Return whether an operation of ATen computes, that is, returns neither a view nor memory
    without values.
    """
    if _MAKES_MEMORY.match(name):
        return False
    return not any(_returns_view(overload) for overload in _overloads(name))


def _returns_view(overload: Any) -> bool:
    """Return whether a result is a view of an argument, instead of one that is written."""
    aliases = [result.alias_info for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _overloads(name: str) -> list[Any]:
    """Return the overloads of an operation of ATen; none if it has another origin."""
    import torch

    packet: Any = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return []
    known = set(torch._C._dispatch_get_all_op_names())  # others are of TorchScript
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in overloads if overload.name() in known]


def operations_of_torch(run: Callable[[], Any]) -> Operations:
    """Return the counts of a run of torch, which has run before."""
    import torch

    has_device = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if has_device:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        # No kernel from before is counted.
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(MARK):
            run()
        if has_device:
            # After the mark, so that this wait is not counted.
            torch.cuda.synchronize()

    profiled: Any = profile.events()
    on_host = [event for event in profiled if event.device_type.name == "CPU"]
    on_device = [event for event in profiled if event.device_type.name != "CPU"]
    mark = next(event for event in on_host if event.name == MARK)
    events = []
    for event in on_host:
        # Gradients may run in another thread, where no event is within the mark.
        is_outermost = event is not mark and event.cpu_parent in (None, mark)
        if is_outermost and mark.time_range.start <= event.time_range.start <= mark.time_range.end:
            events.append(_host_event(event))
    # A kernel may end after the mark, which the profiler also shows on the device.
    events += [Event(event.name, True) for event in on_device if event.name != MARK]
    return operations_of_events(events)


def _host_event(event: Any) -> Event:
    """Return an event of the host, as the profiler has it, with those that it called."""
    return Event(event.name, children=tuple(_host_event(child) for child in event.cpu_children))


# ---- JAX -----------------------------------------------------------------------------------------

_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
_CALL = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = .*? (fusion|custom-call|copy|dot|convolution|outfeed|infeed)\("
)


def operations_of_program(text: str) -> Operations:
    """Return the counts of a compiled program, from its text in HLO; a loop counts once.

    A callback to the host, an infeed and an outfeed count as waits.
    """
    kernels: Counter[str] = Counter()
    is_fused = False
    for line in text.splitlines():
        if line.endswith("{"):
            # A computation begins. Those within a fusion are no calls of their own.
            is_fused = line.lstrip("%").startswith(("fused_", "wrapped_"))
            continue
        call = _CALL.match(line)
        if call is None or is_fused:
            continue
        target = _CUSTOM_CALL.search(line)
        kernel = call[1] if target is None else target[1]
        kernels[kernel] += 1

    num_waits = 0
    for name, count in kernels.items():
        if "callback" in name or name in ("infeed", "outfeed"):
            num_waits += count
    return Operations(dict(kernels), copies=kernels["copy"], syncs=num_waits)
