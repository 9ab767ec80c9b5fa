"""Rows that the demo's tests name, one of them shown over one connector, and SGLang's records. No test lives here."""

from __future__ import annotations

from lmcache_ref.demo import connectors, run_demo

PER_LAYER, MLA, FLAT, FLAT_MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_HS", "TWO_X_NL_X_NBBS_NH_HS", "NL_X_NBBS_ONE_HS"


def demo_one(row, connector, **options):
    (result,) = run_demo([row], connector, **options)
    return result


def sglang(connector_class):
    return connectors.replace(connectors.whole_model(connector_class), load=connectors.load_whole_in_two)


def sglang_layerwise(connector_class):
    return connectors.replace(connectors.layerwise(connector_class), load=connectors.load_layerwise_in_two)
