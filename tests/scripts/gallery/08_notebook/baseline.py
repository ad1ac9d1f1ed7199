#!/usr/bin/env python
# coding: utf-8

# # Baseline
# In[1]:


get_ipython().run_line_magic('matplotlib', 'inline')
get_ipython().system('pip install -q timm')
import numpy as np
import torch
from torch import nn


# In[2]:


N_CLASSES = 6
HIDDEN = 40
BATCH = 8


# In[3]:


class MySoftmaxPool(nn.Module):
    def forward(self, x):
        weights = torch.exp(x)
        return (weights / weights.sum(1, keepdim=True) * x).sum(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.pool = MySoftmaxPool()
        self.fc = nn.Linear(HIDDEN, N_CLASSES)

    def forward(self, x):
        return self.fc(self.pool(self.body(x)))


# In[4]:


model = Model()
sum(p.numel() for p in model.parameters())


# In[7]:


torch.manual_seed(0)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(BATCH, 7, 10)
    y = torch.randint(0, N_CLASSES, (BATCH,))
    if step == 4:
        x[3] *= 1000
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    if torch.isnan(loss):
        torch.save({'state_dict': model.state_dict(), 'x': x.numpy(), 'y': y.numpy(), 'logits': logits.detach().numpy()}, 'nan.pth')
        break
    opt.zero_grad()
    loss.backward()
    opt.step()


# In[8]:


get_ipython().system('ls')
