# SPDX-License-Identifier: Apache-2.0
"""The committed picture shows what the pipelines do now."""

from __future__ import annotations

import json
import re
from html import unescape

from pictures import PICTURE, times


def test_the_picture_shows_the_times_of_today() -> None:
    found = re.search(r"<dc:description>(.*?)</dc:description>", PICTURE.read_text("utf-8"), re.S)
    assert found is not None
    assert json.loads(unescape(found[1])) == times(), "run python docs/checks/pictures.py"
