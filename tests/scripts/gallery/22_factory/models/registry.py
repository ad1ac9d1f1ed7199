_REGISTRY = {}


def register_model(fn):
    _REGISTRY[fn.__name__] = fn
    return fn


def create_model(model_name, pretrained=False, **kwargs):
    return _REGISTRY[model_name](pretrained=pretrained, **kwargs)
