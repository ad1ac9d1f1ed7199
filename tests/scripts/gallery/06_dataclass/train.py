import torch
from model import ModelConfig, Transformer


def main():
    torch.manual_seed(3)
    config = ModelConfig(n_layers=3)
    net = Transformer(config)
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    for step in range(12):
        tokens = torch.randint(0, 64, (4, 16))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        if not torch.isfinite(logits).all():
            torch.save({"state_dict": net.state_dict(), "tokens": tokens, "logits": logits.detach()}, "lm_nan.pth")
            raise RuntimeError(f"NaN at {step}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == 4:  # a learning rate that was far too large
            with torch.no_grad():
                net.blocks[1].up.weight *= 300
                net.blocks[1].gate.weight *= 300


if __name__ == "__main__":
    main()
