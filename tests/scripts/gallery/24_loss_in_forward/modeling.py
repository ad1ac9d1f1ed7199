import torch
from torch import nn


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, labels):
        p = torch.softmax(logits, -1).gather(1, labels[:, None])[:, 0]
        return -((1 - p) ** self.gamma * torch.log(p)).mean()


class ForClassification(nn.Module):
    def __init__(self, vocab_size=60, hidden_size=16, num_labels=3):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.classifier = nn.Linear(hidden_size, num_labels)
        self.criterion = FocalLoss()

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False):
        h = self.embeddings(input_ids)
        if attention_mask is not None:
            h = h * attention_mask[..., None]
        logits = self.classifier(h.sum(1))
        loss = None
        if labels is not None:
            loss = self.criterion(logits, labels)
        return {"loss": loss, "logits": logits}
