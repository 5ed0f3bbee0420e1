"""Sound is written into videos and read from them."""

import math

import pytest
import torch

from flowalign.types import Sound
from flowalign.utils.media.encode import read_sound, write_clip
from flowalign.utils.media.media import Media, MediaProblem

FRAMES, RATE = torch.rand(12, 3, 16, 16), 24_000


def tone(hertz: float, channels: int = 2, seconds: float = 1.0) -> Sound:
    time = torch.arange(round(RATE * seconds)) / RATE
    return Sound((0.5 * torch.sin(2 * math.pi * hertz * time)).expand(channels, -1), RATE)


def pitch(sound: Sound) -> float:
    """Return the strongest frequency in hertz."""
    spectrum = torch.fft.rfft(sound.waveform[0]).abs()
    return float(spectrum.argmax()) * sound.rate / sound.waveform.shape[1]


@pytest.mark.parametrize(("ending", "channels"), [(".mp4", 2), (".mp4", 1), (".webm", 2)])
def test_a_video_returns_the_sound_that_was_written(tmp_path, ending, channels):
    write_clip(tmp_path / f"a{ending}", FRAMES, 12.0, tone(440.0, channels))
    found = read_sound(Media(path=str(tmp_path / f"a{ending}")))
    assert found is not None
    assert found.rate == (RATE if ending == ".mp4" else 48_000)
    assert len(found.waveform) == channels
    assert found.waveform.shape[1] / found.rate == pytest.approx(1.0, abs=0.1)
    assert pitch(found) == pytest.approx(440.0, abs=2.0)
    assert float(found.waveform.square().mean()) == pytest.approx(0.125, rel=0.2)


def test_sound_is_read_from_bytes(tmp_path):
    write_clip(tmp_path / "a.mp4", FRAMES, 12.0, tone(880.0))
    found = read_sound(Media(data=(tmp_path / "a.mp4").read_bytes()))
    assert found is not None
    assert pitch(found) == pytest.approx(880.0, abs=2.0)


def test_a_silent_video_has_no_sound(tmp_path):
    write_clip(tmp_path / "a.mp4", FRAMES, 12.0)
    write_clip(tmp_path / "a.gif", FRAMES, 12.0, tone(440.0))  # GIF holds frames alone
    assert read_sound(Media(path=str(tmp_path / "a.mp4"))) is None
    assert read_sound(Media(path=str(tmp_path / "a.gif"))) is None


def test_unreadable_sound_is_a_problem_of_its_file(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(MediaProblem, match=r"damaged sound of .*a\.mp4: .*Invalid data"):
        read_sound(Media(path=str(tmp_path / "a.mp4")))


def test_three_channels_are_refused_and_leave_no_file(tmp_path):
    with pytest.raises(ValueError, match="one or two channels, got 3"):
        write_clip(tmp_path / "a.mp4", FRAMES, 12.0, tone(440.0, 3))
    assert not list(tmp_path.iterdir())
