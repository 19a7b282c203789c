/** A stream of what an iterable gives, taken as it is read; cancelling it leaves the iterable's loop. */
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
