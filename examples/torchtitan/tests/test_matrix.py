# SPDX-License-Identifier: Apache-2.0
"""The page that ``matrix.py --record`` writes into."""

from __future__ import annotations

import matrix
import pytest


@pytest.fixture
def page(tmp_path, monkeypatch):
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- matrix.py, sim: begin -->\n<!-- matrix.py, sim: end -->\nafter\n")
    monkeypatch.setattr(matrix, "PAGE", file)
    return file


def rows(page):
    return [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]


def test_rows_that_were_not_run_again_are_kept_in_order(page):
    matrix.record("sim", {"tensor parallel": "failed", "pipeline, 1F1B": "same bits"})
    matrix.record("sim", {"tensor parallel": "same bits", "AdamW, fused": "same bits"})
    assert [row.split(" | ")[:3] for row in rows(page)] == [
        ["| AdamW, fused (sim)", "1", "same bits"],
        ["| tensor parallel (sim)", "2", "same bits"],
        ["| pipeline, 1F1B (sim)", "2", "same bits"],
    ]
    assert page.read_text().startswith("before\n<!--")
    assert page.read_text().endswith("-->\nafter\n")


def test_rows_of_other_versions_are_not(page, monkeypatch):
    matrix.record("sim", {"tensor parallel": "same bits"})
    monkeypatch.setattr(matrix, "version", lambda _: "99")
    matrix.record("sim", {"AdamW, fused": "same bits"})
    assert len(rows(page)) == 1
    assert "torch 99" in page.read_text()
