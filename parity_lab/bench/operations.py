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


def operations_of_events(events: Iterable[Event]) -> Operations:
    """Return the counts of a profile, given as its outermost events.

    Events of a device count as kernels if there are any, and the calls of its driver as waits.
    Otherwise operations of ATen count as kernels if they compute and are not composed of others,
    and as waits if they read values.
    """
    events = tuple(events)
    flat = [each for event in events for each in _with_descendants(event)]
    has_device = any(event.is_on_device for event in flat)
    on_device = Counter(
        e.name for e in flat if e.is_on_device and not e.name.startswith(("Memcpy", "Memset"))
    )
    waits = sum(_WAITS.match(event.name) is not None for event in flat)
    return Operations(
        dict(
            on_device
            if has_device
            else Counter(name for event in events for name in _operations(event))
        ),
        copies=sum(event.name == "aten::copy_" for event in flat),
        syncs=waits if has_device else sum(map(_num_reads, events)),
    )


def _with_descendants(event: Event) -> Iterator[Event]:
    yield event
    for child in event.children:
        yield from _with_descendants(child)


def _num_reads(event: Event) -> int:
    """Return the number of reads of values within an event; a read that consists of others counts
    once.
    """
    return 1 if event.name in _READS else sum(map(_num_reads, event.children))


def _operations(event: Event) -> list[str]:
    """Return the names of the outermost operations within an event that compute and are not
    composed of others.
    """
    if not event.name.startswith("aten::") or _is_composed(event.name):
        return [name for child in event.children for name in _operations(child)]
    return [event.name] if _computes(event.name) else []


@cache
def _is_composed(name: str) -> bool:
    """Return whether ATen composes an operation of others on every device."""
    from torch._C import DispatchKey

    return any(
        each.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        for each in _overloads(name)
    )


@cache
def _computes(name: str) -> bool:
    """Return whether an operation of ATen computes, that is, returns neither a view nor memory
    without values.
    """
    returns = [
        each.alias_info for overload in _overloads(name) for each in overload._schema.returns
    ]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    return (
        not is_view
        and re.match(r"aten::((new_)?empty|(as_strided|set|resize)_$|_unsafe_view)", name) is None
    )


def _overloads(name: str) -> list[Any]:
    import torch

    packet: Any = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    known = set(torch._C._dispatch_get_all_op_names())  # others are of TorchScript
    found = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in found if overload.name() in known]


def operations_of_torch(run: Callable[[], Any]) -> Operations:
    """Return the counts of a run of torch, which has run before."""
    import torch

    activities, has_device = torch.profiler.ProfilerActivity, torch.cuda.is_available()
    if has_device:  # no kernel of before is counted
        torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[activities.CPU, *([activities.CUDA] if has_device else [])]
    ) as profile:
        with torch.profiler.record_function(MARK):
            run()
        if has_device:  # after the mark, so that it is not counted
            torch.cuda.synchronize()
    found: Any = profile.events()
    of_host = [each for each in found if each.device_type.name == "CPU"]
    mark = next(each for each in of_host if each.name == MARK)
    begin, end = mark.time_range.start, mark.time_range.end
    outermost = [
        each for each in of_host if each.cpu_parent in (None, mark)
    ]  # gradients may run in another thread

    def event_of(each: Any) -> Event:
        return Event(each.name, children=tuple(map(event_of, each.cpu_children)))

    return operations_of_events(
        [
            *(
                event_of(each)
                for each in outermost
                if each is not mark and begin <= each.time_range.start <= end
            ),
            # A kernel may end after the mark, which the profiler also shows on the device.
            *(
                Event(each.name, True)
                for each in found
                if each.device_type.name != "CPU" and each.name != MARK
            ),
        ]
    )


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
            is_fused = line.lstrip("%").startswith(("fused_", "wrapped_"))
        elif not is_fused and (call := _CALL.match(line)):
            target = _CUSTOM_CALL.search(line)
            kernels[target[1] if target else call[1]] += 1
    waits = [name for name in kernels if "callback" in name or name in ("infeed", "outfeed")]
    return Operations(dict(kernels), kernels.get("copy", 0), sum(kernels[name] for name in waits))
