/** Keeps the end of growing content in view, until somebody scrolls up to read. */
export class Follow {
  /** Pixels from the end within which the view counts as at the end. */
  static readonly NEAR = 40;
  #follows = true;
  #top = 0;

  /** `scroller` shows a part of `content`; both may change their sizes. */
  constructor(
    private readonly scroller: HTMLElement,
    content: HTMLElement,
  ) {
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    const sizes = new ResizeObserver(() => {
      if (this.#follows) this.toEnd();
    });
    for (const each of [scroller, content]) sizes.observe(each);
  }

  toEnd(): void {
    this.#follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Scrolls a page up (−1) or down (1), for keyboard users. The last page down goes to the very end. */
  page(pages: number): void {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    if (pages > 0 && scrollHeight - scrollTop <= 2 * clientHeight) this.toEnd();
    else this.scroller.scrollBy({ top: pages * clientHeight * 0.9 });
    // The event of this scroll comes with the next frame: text that grows before it would undo the key.
    this.#scrolled();
  }

  #scrolled(): void {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    if (scrollHeight - scrollTop - clientHeight < Follow.NEAR) this.#follows = true;
    // Growing text also moves the view away from the end, but never upwards.
    else if (scrollTop < this.#top) this.#follows = false;
    this.#top = scrollTop;
  }
}
