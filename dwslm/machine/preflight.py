"""Whether a machine is fit for a run: checks that say what they saw, and why they refuse."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dwslm.machine.classify import HARDWARE_XID, XID
from dwslm.machine.clocks import breaks_cap, command
from dwslm.machine.health import REASONS, Gpu, Sample

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
BAD_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Why a clock is held back that say: this machine is not well."""
FOREIGN_BYTES = 2 << 30
"""GPU memory in use by others that is taken for another program, not for a driver's own."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    status: str
    """ok, warning (said, not refused), failed, or skipped (with the reason)."""
    said: str


def fit(checks: Iterable[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.status != FAILED for check in checks)


def check_gpu(gpu: Gpu, name: str = "GPU") -> list[Check]:
    """What the driver says of a GPU at rest: driver, memory, memory errors, remapped rows, reasons for a lowered clock."""
    facts = gpu.facts()
    model, uuid = gpu.name()
    used, total = gpu.memory()
    checks = [Check(f"{name}: driver", OK, f"{model} {uuid}, driver {facts['driver']}")]
    if total is not None and used is not None:
        free = f"{(total - used) / 1e9:.0f} of {total / 1e9:.0f} GB free"
        taken = used > FOREIGN_BYTES
        told = f"{free}; other processes hold the rest: see nvidia-smi" if taken else free
        checks.append(Check(f"{name}: memory", FAILED if taken else OK, told))
    checks.append(_check_ecc(gpu.ecc_errors(), name))
    if (rows := gpu.remapped_rows()) is not None:
        told = f"{rows['corrected']} after corrected, {rows['uncorrected']} after uncorrected errors"
        if rows["failed"]:
            checks.append(
                Check(f"{name}: remapped rows", FAILED, f"{told}; one had no spare: this GPU is to be replaced")
            )
        elif rows["pending"]:
            checks.append(Check(f"{name}: remapped rows", FAILED, f"{told}; one waits for a reset of the GPU"))
        else:
            checks.append(Check(f"{name}: remapped rows", OK, told))
    return [*checks, _check_reasons(gpu.sample(), name)]


def _check_ecc(errors: dict[str, int | None], name: str) -> Check:
    name = f"{name}: memory errors"
    corrected, uncorrected = errors["corrected"], errors["uncorrected"]
    if uncorrected is None:
        return Check(name, WARNING, "the GPU does not tell: ECC is off, or it has none")
    told = f"{corrected} corrected, {uncorrected} uncorrected since the boot"
    return Check(name, FAILED if uncorrected else OK, told + ("; reset the GPU" if uncorrected else ""))


def _check_reasons(sample: Sample, name: str) -> Check:
    name = f"{name}: state"
    if sample.reasons is None:
        return Check(name, WARNING, "the GPU does not tell what holds its clock back")
    shown = [word for bit, word in REASONS.items() if sample.reasons & bit]
    bad = [word for word in shown if word in BAD_REASONS]
    told = f"{sample.temperature_c} C, {sample.power_w or 0:.0f} W, clock held back by: {', '.join(shown) or 'nothing'}"
    return Check(name, FAILED if bad else OK, told)


def check_clocks(samples: Sequence[Sample], cap_mhz: int | None, name: str = "GPU") -> Check:
    """What the clock did under load, against the cap that is expected (None: nothing is expected)."""
    name = f"{name}: clock under load"
    seen = [sample.sm_mhz for sample in samples if sample.sm_mhz is not None]
    if not seen:
        return Check(name, SKIPPED, "no clock was sampled under load")
    told = f"{min(seen)} to {max(seen)} MHz"
    bad = sorted(
        {word for s in samples for bit, word in REASONS.items() if (s.reasons or 0) & bit and word in BAD_REASONS}
    )
    if bad:
        return Check(name, FAILED, f"{told}, held back by {', '.join(bad)}: look at cooling and power")
    if cap_mhz is None:
        return Check(name, OK, f"{told}; no cap is expected")
    if breaks_cap(max(seen), cap_mhz):
        return Check(name, FAILED, f"{told}, above the expected cap of {cap_mhz}; set it: {command(cap_mhz)}")
    return Check(name, OK, f"{told}, under the cap of {cap_mhz}")


def check_xid(codes: Sequence[int], name: str = "GPU") -> Check:
    """Error codes of the driver while the checks ran."""
    name = f"{name}: driver errors"
    if not codes:
        return Check(name, OK, "none while this ran")
    told = ", ".join(f"Xid {code}" + (f" ({XID[code][0]}: {XID[code][1]})" if code in XID else "") for code in codes)
    return Check(name, FAILED if set(codes) & set(HARDWARE_XID) else WARNING, told)


def check_disk(folder: Path, needed: int, what: str) -> Check:
    """Free space where `folder` is or would be."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    told = f"{needed / 1e9:.2f} GB needed ({what}), {free / 1e9:.2f} GB free in {folder}"
    return Check("disk", OK if free >= needed else FAILED, told)
