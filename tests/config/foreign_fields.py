#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""foreign_fields.py FILE.py[:CLASS,...] ... -- the fields of other programs' configuration classes, one per line: class, name,
default, another value; values as JSON. Reads sources without importing them. foreign/fields.txt is its output for:

    trl 1.16.0           trl/trainer/{base,sft,dpo,kto,model}_config.py, trl/experimental/{orpo/orpo,cpo/cpo}_config.py
    transformers 5.24.0  transformers/training_args.py:TrainingArguments
    peft 0.21.2          peft/tuners/lora/config.py:LoraConfig
    axolotl 0.19.0       src/axolotl/utils/schemas/{config,model,peft,training,datasets,fsdp,integrations,deprecated}.py
    llamafactory 0.9.5   llamafactory/hparams/{data,model,finetuning,training}_args.py
"""
import ast
import json
import sys

UNKNOWN = object()


def value_of(node):
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def default_of(node):
    """The default of a field, be it in Field(...) or field(...)."""
    if node is None:
        return UNKNOWN
    if not isinstance(node, ast.Call):
        return value_of(node)
    for keyword in node.keywords:
        if keyword.arg == "default":
            return value_of(keyword.value)
        if keyword.arg == "default_factory":
            factory = keyword.value
            if isinstance(factory, ast.Lambda):
                return value_of(factory.body)
            return {"list": [], "dict": {}}.get(getattr(factory, "id", ""), UNKNOWN)
    return UNKNOWN


def other_than(default, annotation):
    """A value that the field might have and that is not the default."""
    if "Literal[" in annotation and isinstance(default, str):
        words = [w.strip("'\" ]") for w in annotation.split("Literal[", 1)[1].split("]")[0].split(",")]
        return next((w for w in words if w and w != default), "other")
    if isinstance(default, bool) or "bool" in annotation.split("|")[0]:
        return not default if isinstance(default, bool) else True
    if isinstance(default, (int, float)):
        return default * 2 + 1 if isinstance(default, int) else default / 2 + 0.125
    for word, value in (("float", 0.375), ("int", 7), ("list", ["other"]), ("dict", {"other": 1})):
        if word in annotation and "str" not in annotation.split(word)[0]:
            return value
    return "other"


# Below another key, or computed by axolotl.
NESTED = ("AxolotlConfigWCapabilities", "DPODataset", "KTODataset", "LrGroup", "EBFTConfig", "SelectiveCheckpointingConfig",
          "PretrainingDataset", "StepwiseSupervisedDataset", "SyntheticDataset", "UserDefinedDPOType", "UserDefinedKTOType",
          "UserDefinedPrompterType", "SpecialTokensConfig", "LoftQConfig", "PeftConfig", "FSDPConfig")


def fields(path, wanted):
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name in NESTED or (wanted and node.name not in wanted):
            continue
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            name, annotation = item.target.id, ast.unparse(item.annotation)
            if name.startswith("_") or name == "model_config" or "ClassVar" in annotation:
                continue
            default = default_of(item.value)
            shown = "-" if default is UNKNOWN else json.dumps(default)
            yield "\t".join((node.name, name, shown, json.dumps(other_than(default, annotation))))


def main():
    for word in sys.argv[1:]:
        path, _, classes = word.partition(":")
        for line in fields(path, set(filter(None, classes.split(",")))):
            print(line)


main()
