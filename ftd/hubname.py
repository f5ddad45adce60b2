"""Names of models on the Hugging Face hub, as configuration and sources tell them from paths: `org/name[@revision]`."""

from __future__ import annotations

import re

# huggingface_hub, `REPO_ID_REGEX` of utils/_validators.py; a revision is a branch, a tag, a commit or refs/pr/<n>
_NAME = re.compile(r"(\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(\w[\w./-]{0,127}))?", re.ASCII)
MAIN = "main"


def split_hub_name(text: str) -> tuple[str, str] | None:
    """Repository and revision (`main` where none is given); None of a text that is no such name.

    Only of the form: a relative path can look the same, and goes first where something is there.
    """
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or text.endswith("/"):
        return None
    if "--" in found[1] or found[1].endswith((".", "-", ".git")):  # a branch may be called so
        return None
    return found[1], found[2] or MAIN
