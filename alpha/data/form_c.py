"""Unicode's normalization form C (UAX 15) as Hugging Face's tokenizers have it: that of Unicode 9, whatever Python runs.

The running Python's form C is the same for every character that Unicode 9 has (the stability policy of Unicode). Newer marks and letters
that a newer Unicode would reorder or compose stay where they are, and what stands between them is brought to form C apart.
"""

from __future__ import annotations

import re
import unicodedata

_NEWER = """
5C8-5C9 7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1AF0 1DF6-1DFA A82C 105C9 105D2 105DA 105E4 10D24-10D27
10D69-10D6D 10EAB-10EAC 10ECB-10ECF 10EF0-10EFB 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382-11385 1138B 1138E
11390-11391 113C2 113C5 113C7-113C8 113CE-113D0 1145E 11839-1183A 11935 11938 1193D-1193E 11943 119E0 11A34 11A47 11A99
11D42 11D44-11D45 11D97 11F41-11F42 1611E 16121-16129 1612F 16D63 16D67-16D6A 16FF0-16FF1 1D127-1D128 1D250-1D252
1D25B-1D25C 1D25F 1D280-1D281 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1E6E3 1E6E6 1E6EE-1E6EF 1E6F5
"""
"""Code points that came with Unicode 10 to 18 and are marks of a combining class, decompose, or begin what decomposes (UnicodeData.txt)."""

_OLD = re.compile(f"[^{''.join('-'.join(chr(int(end, 16)) for end in run.split('-')) for run in _NEWER.split())}]+")


def form_c(text: str) -> str:
    """`text` in form C."""
    if unicodedata.is_normalized("NFC", text):
        return text
    return _OLD.sub(lambda match: unicodedata.normalize("NFC", match[0]), text)
