"""Boards that do not exist, as `mha_tt.mock` describes them to ttnn, in tt-umd's format."""

_BLACKHOLE = """\
arch: {0: blackhole}
chips: {}
chip_unique_ids: {0: 4476187513037}
ethernet_connections: []
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: %d, dram_harvesting_mask: 0, eth_harvesting_mask: 288,
                 pcie_harvesting_mask: 2, l2cpu_harvesting_mask: 0}}
boards: [[board_id: 4476187513037, board_type: %s, chips: [0]]]
"""


def _t3000() -> str:
    """Four n300 side by side: chips 0..3 are seen by the host, 4..7 by them; two links between neighbours."""
    columns = range(4)
    pairs = [(f"chip: {c}, chan: {8 + link}", f"chip: {c + 4}, chan: {link}") for c in columns for link in (0, 1)]
    for row in (0, 4):
        for chip in (row, row + 1, row + 2):
            pairs += [(f"chip: {chip}, chan: {14 + link}", f"chip: {chip + 1}, chan: {6 + link}") for link in (0, 1)]
    harvesting = [f"{{noc_translation: true, harvest_mask: {65 if c in columns else 5}}}" for c in range(8)]
    boards = [f"[board_id: {72058994491072686 + c}, board_type: n300, chips: [{c}, {c + 4}]]" for c in columns]
    lines = [
        f"arch: {{{', '.join(f'{chip}: wormhole_b0' for chip in range(8))}}}",
        f"chips: {{{', '.join(f'{chip}: [{chip % 4}, {chip // 4}, 0, 0]' for chip in range(8))}}}",
        "ethernet_connections:",
        *(f"  - [{{{first}}}, {{{second}}}]" for first, second in pairs),
        f"chips_with_mmio: [{', '.join(f'{c}: {c}' for c in columns)}]",
        f"harvesting: {{{', '.join(f'{chip}: {mask}' for chip, mask in enumerate(harvesting))}}}",
        f"boards: [{', '.join(boards)}]",
    ]
    return "\n".join(lines) + "\n"


BOARDS = {
    "n150": """\
arch: {0: wormhole_b0}
chips: {0: [0, 0, 0, 0]}
ethernet_connections: []
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: 32}}
boards: [[board_id: 72059269369839682, board_type: n150, chips: [0]]]
""",
    "n300": """\
arch: {0: wormhole_b0, 1: wormhole_b0}
chips: {0: [0, 0, 0, 0], 1: [1, 0, 0, 0]}
ethernet_connections:
  - [{chip: 0, chan: 8}, {chip: 1, chan: 0}]
  - [{chip: 0, chan: 9}, {chip: 1, chan: 1}]
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: 65}, 1: {noc_translation: true, harvest_mask: 5}}
boards: [[board_id: 72058994491072686, board_type: n300, chips: [0, 1]]]
""",
    "t3000": _t3000(),
    "p100": _BLACKHOLE % (3, "p100"),
    "p150": _BLACKHOLE % (0, "p150"),
}
"""n150 is one Wormhole, n300 a mesh of 1 x 2 of them, t3000 has four n300, a mesh of 2 x 4
or 1 x 8; p100 and p150 are Blackholes."""

MESHES = {"n300": (1, 2), "t3000": (1, 8)}
"""The shapes in which `mha_tt.mock.board` opens those of several chips."""
