"""What one pattern matches, found by trying every split: an oracle that shares nothing with `ftd.config.globs`."""


def run(glob, text, any_char=lambda char: char != "."):
    """Whether a glob matches a text, `*` and `?` taking only such characters."""
    if not glob:
        return not text
    if glob[0] == "*":
        if run(glob[1:], text, any_char):
            return True
        return bool(text) and any_char(text[0]) and run(glob, text[1:], any_char)
    if not text or not (glob[0] == text[0] or (glob[0] == "?" and any_char(text[0]))):
        return False
    return run(glob[1:], text[1:], any_char)


def segments_match(pattern, path, most):
    """Whether segments match when each `*` segment takes from one up to `most` segments."""
    if not pattern:
        return not path
    if not path:
        return False
    if pattern[0] == "*":
        taken = range(1, min(most, len(path)) + 1)
        return any(segments_match(pattern[1:], path[count:], most) for count in taken)
    return run(pattern[0], path[0]) and segments_match(pattern[1:], path[1:], most)


def one_segment(pattern, path):
    return segments_match(pattern.split("."), path.split("."), 1)


def one_or_more(pattern, path):
    return segments_match(pattern.split("."), path.split("."), 1000)


def in_class_name(pattern, name):
    return run(pattern, name, lambda char: True)
