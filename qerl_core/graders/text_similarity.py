"""`text_similarity`: how alike two rendered texts are, from 0 to 1. Nothing is downloaded, ever.

    fuzzy_match   rapidfuzz `fuzz.ratio` / 100: 2 M / T, M characters of T in common (indel distance)
    bleu          sacrebleu `sentence_bleu` / 100: 13a tokens, exponential smoothing, effective order
    gleu          nltk `sentence_gleu`, 1- to 4-grams (Wu et al. 2016)
    meteor        nltk `single_meteor_score` with its exact and its Porter-stem stage. WordNet is a corpus that would
                  have to be downloaded, so the synonym stage finds nothing.
    rouge_1 .. 5  rouge-score, F1 of n-grams; rouge_l: F1 of the longest common subsequence. No stemming.

gleu, meteor and rouge see lower-case words of any script, a Chinese, Japanese or Korean character being a word; gleu
and meteor see punctuation too. rouge-score's own tokenizer knows nothing but a-z and 0-9.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")


def warm(spec: Mapping[str, Any]) -> None:
    """Import what the metric needs."""
    similarity("a cat sat there", "a cat sat here", spec["evaluation_metric"])


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """From 0 to 1; with `pass_threshold` one of both. GradeFailure if a template cannot be rendered."""
    text = template.render(spec["input"], item=item, output_text=output_text)
    reference = template.render(spec["reference"], item=item, output_text=output_text)
    value = similarity(text, reference, spec["evaluation_metric"])
    threshold = spec.get("pass_threshold")
    return value if threshold is None else float(value >= threshold)


def similarity(text: str, reference: str, metric: str) -> float:
    """The metric, from 0 to 1. 1 for two equal texts, whatever they are, and 0 if just one of them has no words."""
    if text == reference:
        return 1.0
    if not text.strip() or not reference.strip():
        return 0.0
    value = float(_measure(text, reference, metric))
    if not math.isfinite(value):
        raise GradeFailure("other_error", f"{metric} of these texts is not a number")
    return min(1.0, max(0.0, value))


def _measure(text: str, reference: str, metric: str) -> float:
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return fuzz.ratio(text, reference) / 100
    if metric == "bleu":
        import sacrebleu

        return float(sacrebleu.sentence_bleu(text, [reference]).score) / 100
    if metric.startswith("rouge_"):
        name = "rougeL" if metric == "rouge_l" else f"rouge{metric[-1]}"
        return float(_rouge(name).score(reference, text)[name].fmeasure)
    tokens, reference_tokens = _TOKEN.findall(text.lower()), _TOKEN.findall(reference.lower())
    if metric == "gleu":
        from nltk.translate.gleu_score import sentence_gleu

        return float(sentence_gleu([reference_tokens], tokens))
    from nltk.translate.meteor_score import single_meteor_score

    return float(single_meteor_score(reference_tokens, tokens, wordnet=_NoSynonyms()))


class _Words:
    """A tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


class _NoSynonyms:
    """A WordNet without words."""

    def synsets(self, word: str) -> list[Any]:
        return []


@cache
def _rouge(name: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([name], tokenizer=_Words())
