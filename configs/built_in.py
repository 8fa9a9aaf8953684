"""The project's own models and loggers: the name that an option takes, and where the class is. Imports nothing.

This is the one place where they are registered. Metrics are in `nn/models/metric.py`, losses in `nn/layers/task_losses.py`.
"""

MODELS = {
    "dlrm": "nn.models.dlrm:DLRM",
    "dcnv2": "nn.models.dcnv2:DCNv2",
    "wide_deep": "nn.models.wide_deep:WideDeep",
    "deepfm": "nn.models.deepfm:DeepFM",
    "embedding_mlp": "nn.models.embedding_mlp:EmbeddingMLP",
    "finalmlp": "nn.models.finalmlp:FinalMLP",
    "masknet": "nn.models.masknet:MaskNet",
    "wukong": "nn.models.wukong:WuKong",
    "din": "nn.models.din:DIN",
    "sasrec": "nn.models.sasrec:SASRec",
    "bst": "nn.models.bst:BST",
    "transact": "nn.models.transact:TransAct",
    "onetrans": "nn.models.onetrans:OneTrans",
    "sim": "nn.models.sim:SIM",
    "hstu": "nn.models.hstu:HSTU",
    "shared_bottom": "nn.models.shared_bottom:SharedBottom",
    "mmoe": "nn.models.mmoe:MMoE",
    "ple": "nn.models.ple:PLE",
    "rankmixer": "nn.models.rankmixer:RankMixer",
    "fcn": "nn.models.fcn:FCN",
    "autoint": "nn.models.autoint:AutoInt",
    "xdeepfm": "nn.models.xdeepfm:XDeepFM",
    "esmm": "nn.models.esmm:ESMM",
    "pepnet": "nn.models.pepnet:PEPNet",
    "star": "nn.models.star:STAR",
}

SEVERAL_LABELS = ("shared_bottom", "mmoe", "ple", "esmm", "pepnet", "star", "rankmixer", "hstu")
"""The models with a logit per label."""

LOGGERS = {
    "tensorboard": "nn.loggers.tensorboard_logger:TensorBoardLogger",
    "wandb": "nn.loggers.wandb_logger:WandbLogger",
    "mlflow": "nn.loggers.mlflow_logger:MLflowLogger",
}
