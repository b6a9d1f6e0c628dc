"""How a model is trained, as options: its loss, what is trained of it, and the optimizer."""

from collections.abc import Mapping
from typing import Any

from twinstream.models.adapters.lora import Lora
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.hf.config import Dtype
from twinstream.models.loss import loss_of
from twinstream.models.model import AnyModel
from twinstream.models.recipe import (
    GradientDtype,
    OptimizerState,
    Recipe,
    recipe_of_fields,
)
from twinstream.models.trained import require_few_bits, trained_of
from twinstream.models.update_rules import BETAS, RULES, OwnRule, update_rule
from twinstream.options.option_group import OPTIMIZER, TRAINED, OptionGroup, flag

# The fields of a recipe that an option decides.
_DECIDES: Mapping[str, tuple[str, ...]] = {
    "lora": ("lora", "frozen"),
    "freeze": ("lora", "frozen"),
    "base": ("base",),
    "loss": ("loss",),
    "optim": ("update", "beta1", "beta2"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
}


class RecipeOptions(OptionGroup):
    """The recipe of a step, as far as neither data nor kernels decide it."""

    lora: str | None = flag(
        TRAINED,
        "r=16,...",
        "Freeze the model and train adapters beside its projections: r=16,alpha=32,"
        "targets=q,k,v,o,gate,up,down (any of which may be left out, but not all). rslora scales "
        "by sqrt(r), dropout=0.05 drops inputs out, save=embed_tokens,lm_head trains these whole.",
    )
    loss: str | None = flag(
        TRAINED,
        "dpo|FILE.py:FUNCTION",
        "dpo[,beta=0.1,label_smoothing=0] prefers the chosen to the rejected answer of each pair. "
        "Or a loss of your own: of logits [R, V] and labels [R] one of each row; the model then "
        "runs by its own code.",
    )
    aux_loss: float | None = flag(
        TRAINED,
        "X",
        "What the load-balancing loss of experts counts; by default what the model's config.json "
        "says, which is mostly nothing.",
        ge=0,
        le=1e3,
        rare=True,
    )
    trust_remote_code: bool = flag(
        TRAINED,
        "",
        "Run the Python files in the model's folder; read them first.",
        False,
        rare=True,
    )
    freeze: tuple[str, ...] = flag(
        TRAINED,
        "PATTERN",
        "Do not train weights whose Hugging Face names match, as 'model.layers.[0-3].*'; whole "
        "layers, embedding or head. May be given again.",
        (),
        rare=True,
    )
    base: BaseFormat = flag(
        TRAINED,
        "8bit|nf4",
        "Keep the matrices of frozen blocks in few bits (8.125 or 4.5 each).",
        "model",
    )
    dtype: Dtype | None = flag(
        TRAINED,
        "NAME",
        "Dtype of parameters and activations, bfloat16 or float32; by default the model's.",
        rare=True,
    )
    optim: str = flag(
        OPTIMIZER,
        "NAME",
        f"The rule of updates: {', '.join(RULES)}, or FILE.py:FUNCTION[,states=N] of your own.",
        "adamw",
    )
    optimizer_state: OptimizerState = flag(
        OPTIMIZER,
        "NAME",
        "m and v in the model's dtype (model), in float32 beside float32 parameters "
        "(float32_master), or 8bit.",
        "model",
    )
    gradients: GradientDtype = flag(
        OPTIMIZER,
        "DTYPE",
        "What weight gradients are added up in: model (the model's dtype) or float32.",
        "model",
        rare=True,
    )

    def recipe_fields(self, model: AnyModel, adapters: Lora | None = None) -> dict[str, Any]:
        """Fields of the model's recipe that these options decide.

        Args:
            adapters: those that are there already.

        Raises:
            TwinstreamError: the rule, adapters, or what is frozen are none of this model.
        """
        trained = trained_of(model, self.lora, self.freeze, self.base, adapters)
        rule = update_rule(self.optim)
        beta1, beta2 = BETAS["adamw"] if isinstance(rule, OwnRule) else BETAS[rule]
        return {
            "lora": trained.lora,
            "frozen": trained.frozen,
            "base": trained.base,
            "loss": loss_of(self.loss),
            "update": rule,
            "beta1": beta1,
            "beta2": beta2,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer_state,
        }

    def recipe(self, model: AnyModel, adapters: Lora | None = None, **others: object) -> Recipe:
        """The recipe that these options decide.

        Args:
            adapters: those that are there already.
            others: fields of the recipe that are no options of a recipe; kernels, say.

        Raises:
            TwinstreamError: as `recipe_fields`, or fields do not go together.
        """
        return recipe_of_fields(self.recipe_fields(model, adapters) | others)

    def changed(self, was: Recipe, model: AnyModel, **others: object) -> Recipe:
        """A recipe of this model with the options that were given in place of its own.

        Raises:
            TwinstreamError: as `recipe`.
        """
        given = self.given_recipe_fields(model) if self.model_fields_set else {}
        changes = given | others
        return recipe_of_fields({**dict(was), **changes}) if changes else was

    def given_recipe_fields(self, model: AnyModel) -> dict[str, Any]:
        """Return the fields that options decide which were given; others are as they were.

        Raises:
            TwinstreamError: as `recipe_fields`.
        """
        require_few_bits(model, self.base)  # of what is frozen, a recipe from before may know
        fields = self.model_copy(update={"base": "model"}).recipe_fields(model)
        wanted = {field for name in self.model_fields_set for field in _DECIDES.get(name, ())}
        return {n: value for n, value in {**fields, "base": self.base}.items() if n in wanted}
