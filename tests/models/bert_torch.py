"""A BERT in plain PyTorch, small and deterministic; trains a few steps and prints a digest of its weights."""

import hashlib
import sys

import torch
from torch import nn

WORDS, POSITIONS, TYPES = 50, 16, 2
LAYERS, WIDTH, HEADS, INNER = 2, 32, 4, 64
BATCH, LENGTH, LABELS = 2, 8, 3


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, words, types):
        positions = torch.arange(words.shape[1])
        total = self.word_embeddings(words) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(total + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask):
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        found = self.dropout(scores.softmax(-1)) @ value
        return found.transpose(1, 2).reshape(x.shape)

    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Output(nn.Module):
    """Dense, and the residual connection around what came before."""

    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, residual):
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = SelfAttention()
        self.output = Output(WIDTH)

    def forward(self, x, mask):
        return self.output(self.self(x, mask=mask), residual=x)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.activation = nn.GELU()

    def forward(self, x):
        return self.activation(self.dense(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.intermediate = Intermediate()
        self.output = Output(INNER)

    def forward(self, x, mask):
        attended = self.attention(x, mask)
        return self.output(self.intermediate(attended), attended)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, mask):
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()

    def forward(self, x):
        return self.activation(self.dense(x[:, 0]))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = Encoder()
        self.pooler = Pooler()
        self.classifier = nn.Linear(WIDTH, LABELS)

    def forward(self, words, types):
        mask = torch.zeros(words.shape[0], 1, 1, words.shape[1])
        return self.classifier(self.pooler(self.encoder(self.embeddings(words, types), mask)))


def batch():
    words, types = torch.randint(WORDS, (BATCH, LENGTH)), torch.randint(TYPES, (BATCH, LENGTH))
    return words, types, torch.randint(LABELS, (BATCH,))


def digest(model):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def main(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        words, types, labels = batch()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words, types), labels).backward()
        optimizer.step()
    print(digest(model))


if __name__ == "__main__":
    main(int(sys.argv[1]))
