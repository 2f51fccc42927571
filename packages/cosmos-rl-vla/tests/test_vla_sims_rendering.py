"""What becomes of a MuJoCo model's shadows, reflections and multisampling when it is drawn."""

import importlib
import importlib.util
import os

import numpy as np
import pytest
from vla_fixtures import why_not_drawn

from cosmos_rl_vla.sims.rendering import choose_gl, fit, lighten, renderer

SIZE = 64
SCENE = """
<mujoco>
  <visual><headlight ambient=".2 .2 .2" diffuse="0 0 0"/></visual>
  <asset><material name="mirror" reflectance="{reflectance}"/></asset>
  <worldbody>
    <light pos="0 0 4" diffuse="1 1 1" cutoff="80" castshadow="{castshadow}"/>
    <camera name="above" pos="0 -3 3" xyaxes="1 0 0 0 1 1"/>
    <geom type="plane" size="3 3 .1" material="mirror" rgba=".6 .6 .6 1"/>
    <geom type="box" size=".3 .3 .05" pos="0 0 .9" rgba="1 0 0 1"/>
  </worldbody>
</mujoco>
"""

WHY_NOT = why_not_drawn("mujoco")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def scene(*, castshadow="true", reflectance=0.0):
    choose_gl(os.environ)  # before MuJoCo is imported, which looks for it
    mujoco = importlib.import_module("mujoco")
    return mujoco.MjModel.from_xml_string(SCENE.format(castshadow=castshadow, reflectance=reflectance))


def draw(model, prepare, *, called):
    """Return a picture [H, W, 3] of a model that was prepared."""
    mujoco = importlib.import_module("mujoco")
    prepare(model, height=SIZE, width=SIZE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return renderer().render(called, model, data, camera="above", height=SIZE, width=SIZE).astype(int)


def of_box(image):
    return image[..., 0] > image[..., 1] + 40


def test_a_shadow_is_drawn_where_it_is_asked_for_and_nowhere_else():
    with_shadow = draw(scene(), fit, called="shadow")
    without = draw(scene(), lighten, called="shadow")  # the same name: what is drawn is the model's own
    unlit = draw(scene(castshadow="false"), fit, called="shadow")
    floor = ~(of_box(with_shadow) | of_box(without))
    darker = (without - with_shadow).max(2) > 60
    assert 0.02 < (darker & floor).mean() < 0.3
    assert not ((with_shadow - without).max(2) > 60)[floor].any()
    rows, columns = np.nonzero(darker & floor)
    assert rows.mean() > np.nonzero(of_box(without))[0].mean()  # on the floor, which lies below the box in the picture
    assert abs(columns.mean() - SIZE / 2) < 2  # and as far to the right as it
    assert not (np.abs(unlit - without).max(2) > 60)[floor].any()


def test_a_floor_mirrors_where_it_is_asked_for():
    mirrored = of_box(draw(scene(castshadow="false", reflectance=0.9), fit, called="mirror"))
    plain = of_box(draw(scene(castshadow="false", reflectance=0.9), lighten, called="mirror"))
    assert plain.sum() + 20 < mirrored.sum()
    assert np.array_equal(plain, of_box(draw(scene(castshadow="false"), lighten, called="mirror")))


def test_edges_are_smooth_where_it_is_asked_for():
    def halves(image):
        """Pixels that are neither of the box nor of the floor."""
        red = image[..., 0] - image[..., 1]
        return ((red > 60) & (red < 150)).sum()

    smooth, hard = (draw(scene(castshadow="false"), prepare, called="edge") for prepare in (fit, lighten))
    assert halves(smooth) > halves(hard) == 0


@pytest.mark.parametrize(("castshadow", "kept"), [("true", True), ("false", False)])
def test_a_map_for_shadows_is_kept_where_a_light_casts_one(castshadow, kept):
    model = scene(castshadow=castshadow)
    before = model.vis.quality.shadowsize
    fit(model, height=SIZE, width=SIZE)
    assert before > 0 and model.vis.quality.shadowsize == (before if kept else 0)
