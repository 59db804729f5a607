# SPDX-License-Identifier: Apache-2.0
"""The section of a device check that compares with others."""

from __future__ import annotations

import argparse

from device_common import Place, main, row


def peers(place: Place) -> None:
    import peers as cases

    millions = 1 if place.simulated else 100
    most = 240.0 if place.simulated else 60.0
    args = argparse.Namespace(
        device=place.asked, tensors=50, numel=20_000 * millions, steps=6,
        seconds=min(most, place.left() - 5),
        only=["torch AdamW, fused", "swap_torch, packed"] if place.simulated else None,
    )  # fmt: skip
    if place.simulated:
        args.tensors = 8
    for result in cases.run_all(args):
        name, *told = next(iter(cases.rows([result])))
        ours = result["name"].startswith("swap_torch")
        ok = bool(result["runs"] and result["equal_bits"]) if ours else None
        labels = ("step ms", "idle MiB", "peak MiB", "host MiB", "against native")
        value = ", ".join(f"{k} {v}" for k, v in zip(labels, told, strict=True))
        row(
            name,
            value if result["runs"] else f"cannot run here: {result['reason']}",
            ok,
            headline=ours,
        )
        args.seconds = max(0.1, min(most, place.left() - 5))


if __name__ == "__main__":
    main({"peers": peers})
