class CFG:
    width = 20
    classes = 2
    eps = 1e-8
