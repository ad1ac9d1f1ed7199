import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dim = dim

    def forward(self, x):
        attn = torch.matmul(self.query(x), self.key(x).transpose(1, 2))
        attn = F.softmax(attn / math.sqrt(self.dim), dim=-1)
        return x + attn.to(x.dtype) @ self.value(x).to(x.dtype)


class ViT(nn.Module):
    def __init__(self, dim, depth, classes=5):
        super().__init__()
        self.patch = nn.Linear(12, dim)
        self.layers = nn.Sequential(*[SelfAttention(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.layers(self.patch(images))
        return self.head(x.mean(1))


def teacher_model():
    return ViT(48, 3)


def student_model():
    return ViT(24, 2)


torch.manual_seed(0)
teacher, student = teacher_model().eval(), student_model()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(5):
    images, labels = torch.randn(4, 9, 12), torch.randint(0, 5, (4,))
    if step == 4:
        with torch.no_grad():
            student.layers[1].query.weight *= 2e3
            student.layers[1].key.weight *= 2e3
    with torch.no_grad():
        teacher_logits = teacher(images)
    with torch.autocast("cpu", dtype=torch.float16):
        student_logits = student(images)
    loss = F.kl_div(F.log_softmax(student_logits.float(), -1), F.softmax(teacher_logits, -1), reduction="batchmean")
    loss = loss + F.cross_entropy(student_logits.float(), labels)
    if not torch.isfinite(loss):
        torch.save({"teacher": teacher.state_dict(), "student": student.state_dict(), "optimizer": optimizer.state_dict(),
                    "images": images, "labels": labels, "teacher_logits": teacher_logits,
                    "student_logits": student_logits.detach(), "loss": loss.item()}, "distill_nan.pth")
        raise RuntimeError("NaN")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
