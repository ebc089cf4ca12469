"""The page at / in a real browser, over a driver without a model; screenshots go to $LPR_SCREENSHOTS, if it is set."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.fake_driver import facts, served, tokenizer_json

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")


@pytest.fixture(scope="module")
def browser():
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,800",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    with served() as service:
        service.driver.text = "if amount > self.balance:\n            raise ValueError('too much')\n"
        service.driver.per_step = 4
        yield open_page(browser, service), service
        problems = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        assert not problems, problems


def open_page(browser, service):
    browser.set_window_size(1280, 800)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    leave(browser)
    browser.get(service.url + "/")
    wait(browser, lambda: browser.execute_script("return document.body?.dataset.ready") == "yes")
    return browser


def leave(browser):
    """Leave the page of the test before, whose service is gone, and forget what it logged."""
    browser.get("about:blank")
    browser.get_log("browser")


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 15, 0.02).until(lambda _: condition())


def element(browser, name):
    return browser.find_element("id", name)


def put(browser, before, after=""):
    script = (
        "const code = document.getElementById('code'); code.value = arguments[0] + arguments[1];"
        "code.focus(); code.setSelectionRange(arguments[0].length, arguments[0].length);"
    )
    browser.execute_script(script, before, after)


def complete(browser):
    wait(browser, lambda: element(browser, "go").is_enabled())
    before = browser.execute_script("return Number(document.body.dataset.done || 0)")
    element(browser, "go").click()
    wait(browser, lambda: browser.execute_script("return Number(document.body.dataset.done || 0)") > before)


def shot(browser, name):
    if folder := os.environ.get("LPR_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_a_completion_shows_each_step_and_where_its_tokens_came_from(page):
    browser, service = page
    put(browser, "def withdraw(self, amount):\n        ")
    complete(browser)
    steps = browser.find_elements("css selector", "#view .step")
    text = "".join(step.get_attribute("textContent") for step in steps)
    assert text == service.driver.text and len(steps) == len(browser.find_elements("css selector", "#bars > div"))
    tokens, number = int(element(browser, "tokens").text), int(element(browser, "steps").text)
    assert number == len(steps) and element(browser, "perStep").text == f"{tokens / number:.2f}"
    assert "this prompt and text" in element(browser, "legend").text
    assert element(browser, "cached").text.startswith("3/")
    shot(browser, "light")
    element(browser, "keep").click()
    assert element(browser, "code").get_attribute("value").endswith(text)
    assert service.driver.submitted[-1].params.temperature == 0


def test_the_cursor_makes_a_hole_and_the_settings_are_sent(page):
    browser, service = page
    put(browser, "a = ", "\nprint(a)\n")
    browser.execute_script(
        "document.getElementById('temperature').value = 0.7; document.getElementById('seed').value = 42;"
        "document.getElementById('most').value = 3;"
    )
    complete(browser)
    sent = service.driver.submitted[-1]
    assert (sent.params.temperature, sent.params.seed, sent.params.max_new_tokens) == (0.7, 42, 3)
    text = service.front.context.served.tokens.decode(sent.token_ids)
    assert text == "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)\n<|fim_middle|>"
    browser.find_element("tag name", "body").send_keys("\ue00c")  # Escape
    assert element(browser, "code").get_attribute("value") == "a = \nprint(a)\n"


def test_stop_ends_a_completion_on_the_ranks(page):
    browser, service = page
    service.driver.hold = True
    put(browser, "x")
    element(browser, "go").click()
    wait(browser, lambda: service.driver.submitted)
    element(browser, "stop").click()
    wait(browser, lambda: service.driver.aborted)
    wait(browser, lambda: element(browser, "go").is_enabled())


def test_a_refusal_is_shown(page):
    browser, _ = page
    put(browser, "x")
    browser.execute_script("document.getElementById('most').value = 100000")
    element(browser, "go").click()
    wait(browser, lambda: "max_tokens" in element(browser, "problem").text)
    browser.get_log("browser")  # the 400 is in there, as it should


def test_a_model_without_the_tokens_says_so(browser):
    with served(facts(tokenizer=tokenizer_json(), vocab_size=4096)) as service:
        open_page(browser, service)
        assert not element(browser, "hole").is_enabled()
        assert "was not trained for it" in element(browser, "holeLabel").text
        put(browser, "a = ", "\nprint(a)\n")
        complete(browser)
        assert service.front.context.served.tokens.decode(service.driver.submitted[-1].token_ids) == "a = "


def test_a_key_is_asked_for(browser):
    with served(api_key="secret") as service:
        leave(browser)
        browser.get(service.url + "/")
        wait(browser, lambda: "key" in element(browser, "facts").text)
        element(browser, "key").send_keys("secret\t")
        wait(browser, lambda: "lp 1" in element(browser, "facts").text)
        put(browser, "a")
        complete(browser)
        assert len(service.driver.submitted) == 1
        browser.get_log("browser")  # the 401 is in there, as it should


def test_while_the_model_loads_the_page_says_so_and_goes_on_by_itself(browser):
    with served(connect=False) as service:
        leave(browser)
        browser.get(service.url + "/")
        wait(browser, lambda: "not loaded yet" in element(browser, "facts").text)
        assert "starting" in element(browser, "state").text and not element(browser, "go").is_enabled()
        shot(browser, "loading")
        service.call(lambda: asyncio.ensure_future(service.driver.run()))
        wait(browser, lambda: "lp 1" in element(browser, "facts").text)
        put(browser, "a")
        complete(browser)
        service.call(service.front.stop)
        wait(browser, lambda: "not answer" in element(browser, "state").text)
        assert not element(browser, "go").is_enabled()
        browser.get_log("browser")  # the 503s are in there, as they should


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_a_dark_room(page, scheme):
    browser, service = page
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        put(browser, "def withdraw(self, amount):\n        ")
        complete(browser)
        widths = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], "the page is wider than the phone"
        for name in ("go", "keep", "drop"):
            assert element(browser, name).size["height"] >= 36
        shot(browser, f"phone-{scheme}")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    shot(browser, f"wide-{scheme}")
