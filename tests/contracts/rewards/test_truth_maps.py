"""Ground truth per object and per letter: the map is 1 at right places and 0 at wrong ones."""

import torch
import world

from flowalign.types import MediaBatch
from reward_models.verifiers.shapes import find_objects
from reward_models.verifiers.truth import ShapesMap, WordsMap
from reward_models.verifiers.words import HEIGHT, WIDTH, Label, draw


def output(model, image, prompt):
    return model.score(MediaBatch(image[None, None], [prompt]))


def test_the_wrong_object_of_two_is_0_and_the_other_1():
    drawn, asked = "a red circle left of a blue square", "a red circle left of a green square"
    image = world.render(drawn, torch.Generator().manual_seed(0))
    right, wrong = (output(ShapesMap(), image, prompt) for prompt in (drawn, asked))
    assert right.values.item() == 1
    objects = find_objects(image[None])
    for k, kind in enumerate(objects.kinds(0)):
        x, y = objects.centre[0, k].long().tolist()
        assert right.maps["shapes_map"][0, y, x] == 1
        assert wrong.maps["shapes_map"][0, y, x] == float(kind == ("red", "circle"))
    assert right.maps["shapes_map"][0, 0, 0] == 0.5


def test_an_object_in_the_wrong_place_is_wrong():
    image = world.render("a red circle left of a blue square", torch.Generator().manual_seed(0))
    found = output(ShapesMap(), image, "a red circle right of a blue square")
    assert found.values.item() == 0


def test_the_wrong_letter_of_a_word_is_0():
    image = torch.from_numpy(draw(Label("SUN", "red", "white", "sans"), 5, 6))
    found = output(WordsMap(), image, 'the word "SON" in red on white, sans')
    assert found.values.item() == torch.tensor(2 / 3)
    row = found.maps["words_map"][0, HEIGHT // 2]
    order = [value for value in row.unique_consecutive().tolist() if value != 0.5]
    assert order == [1, 0, 1]
    assert row.shape == (WIDTH,)


def test_an_image_without_letters_has_an_even_map():
    found = output(WordsMap(), torch.ones(3, HEIGHT, WIDTH), 'the word "SON" in red on white, sans')
    assert found.values.item() == 0
    assert (found.maps["words_map"] == 0.5).all()
