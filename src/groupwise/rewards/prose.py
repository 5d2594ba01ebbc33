"""Rewards for how a completion is written, whatever it answers: does it repeat itself, is it in one script."""

from __future__ import annotations

import re
import unicodedata
from typing import ClassVar, Literal

from pydantic import Field

from groupwise.records import Rollout
from groupwise.slots import Slot

_HAN_AND_KANA = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Chinese and Japanese put no spaces between words: each character counts as one.
_CHUNKS = re.compile(rf"[{_HAN_AND_KANA}]|[^\s{_HAN_AND_KANA}]+")
_WORDS = re.compile(rf"[{_HAN_AND_KANA}]|[^\W\d_{_HAN_AND_KANA}]+")
_NOT_PROSE = re.compile(
    r"\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]|```.*?```|\\[A-Za-z]+|</?[A-Za-z]+>|(?<![^\W\d_])[A-Za-zα-ω](?![^\W\d_])",
    re.DOTALL,
)  # fmt: skip
_SCRIPTS = {  # how the Unicode names of their letters begin
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "han": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA"),
    "hangul": ("HANGUL",),
    "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",),
    "thai": ("THAI",),
}


class Repetition(Slot):
    """`distinct / all - 1` over the n-grams of words: 0 when none occurs twice, towards -1 the more are repeated.

    arXiv:2502.03373, appendix C.2, whose largest penalty is the weight of this reward.  Fewer words than one n-gram
    repeat nothing: 0.
    """

    in_process: ClassVar[bool] = True
    type: Literal["repetition"] = "repetition"
    ngram: int = Field(default=3, ge=1)
    """Words in a row that count as one piece."""

    def __call__(self, rollout: Rollout) -> float:
        words = _CHUNKS.findall(rollout.text.lower())
        ngrams = list(zip(*(words[start:] for start in range(self.ngram)), strict=False))
        return len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0


class Script(Slot):
    """The share of words that are written in one script, such as Latin; 0 when there is no word.

    It stands for the language consistency reward of DeepSeek-R1 (arXiv:2501.12948: the share of words in the target
    language), which needs a model of language.  This one tells Chinese from English, and not English from German.
    Formulas, code, tags, LaTeX commands and single Latin or Greek letters are no words.
    """

    in_process: ClassVar[bool] = True
    type: Literal["script"] = "script"
    script: Literal[
        "latin", "cyrillic", "greek", "han", "japanese", "hangul", "arabic", "hebrew", "devanagari", "thai"
    ] = "latin"
    """The script that words should be in; `japanese` is kana and Han characters."""

    def __call__(self, rollout: Rollout) -> float:
        words = _WORDS.findall(_NOT_PROSE.sub(" ", rollout.text))
        starts = _SCRIPTS[self.script]
        inside = [all(unicodedata.name(letter, "").startswith(starts) for letter in word) for word in words]
        return sum(inside) / len(inside) if inside else 0.0
