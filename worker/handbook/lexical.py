"""The teacher's other half: which words and letters a question has, by logistic regression."""

import re

import torch
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

# Log-probabilities are not less than this.
LEAST = -14.0
CHUNK = 4096


def plain(texts):
    return [re.sub(r"[^a-z0-9_\-/ ]", " ", text.lower()) for text in texts]


class Lexical:
    """Words and pairs of words, and two to five letters in a row."""

    def __init__(self, pairs):
        self.kinds = [
            TfidfVectorizer(analyzer="word", token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=2)]
        texts = plain(text for text, _ in pairs)
        seen = hstack([kind.fit_transform(texts) for kind in self.kinds]).tocsr()
        self.model = LogisticRegression(C=30, max_iter=50, tol=1e-3).fit(seen, [topic for _, topic in pairs])

    def log_chances(self, texts):
        """`[texts, topics]`."""
        parts = []
        for start in range(0, len(texts), CHUNK):
            some = plain(texts[start: start + CHUNK])
            seen = hstack([kind.transform(some) for kind in self.kinds]).tocsr()
            parts.append(torch.tensor(self.model.predict_log_proba(seen)).float().clamp(min=LEAST))
        return torch.cat(parts)
