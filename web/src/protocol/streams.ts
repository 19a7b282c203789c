/**
 * A ReadableStream of an iterable's values, which are taken as the stream is read. Cancelling the stream ends
 * the iterable's loop.
 */
export function streamOf<T>(values: AsyncIterable<T>): ReadableStream<T> {
  const iterator = values[Symbol.asyncIterator]();
  return new ReadableStream<T>({
    async pull(controller) {
      const { done, value } = await iterator.next();
      if (done) controller.close();
      else controller.enqueue(value);
    },
    async cancel() {
      await iterator.return?.();
    },
  });
}
